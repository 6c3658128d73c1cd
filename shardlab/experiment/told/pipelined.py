"""What a comparison says of its pipelines: how much of the ranks' time is idle, by run, measured and foretold."""

from math import nan
from typing import Any

import pandas as pd

from shardlab.analysis.rows import in_timed_steps
from shardlab.experiment.trained.pipelined import SLOTS
from shardlab.plots.text import format_percent
from shardlab.records.store import Records
from shardlab.schedules import Schedule, play
from shardlab.why.pipelined import medians, pipelined_steps

BUBBLES = (
    "Pipelines: how long ranks wait for other stages, from the first action of any to the last of all: measured, "
    "foretold by the list of actions with the recorded times of work and messages, and by the list alone, of equal "
    "stages."
)

COLUMNS = ["bubble", "foretold_bubble", "even_bubble", "in_flight", "bubble_unknown"]


def bubbles(records: Records) -> pd.DataFrame:
    """Of each run with a schedule: shares of all ranks' time from the first action of any to the last of all.

    Returns:
        By ``run``: ``bubble``, in which ranks wait for other stages, the median of the steps that count;
        ``foretold_bubble`` by the same list, from the recorded times of work and of messages; ``even_bubble``, by the
        list alone, if stages were equal, backward twice forward, and messages took no time; ``in_flight``, the most
        micro-batches that a rank holds, see ``Schedule.held``; ``bubble_unknown``, why the first two are missing, empty
        where they are not.
    """
    rows = {}
    for run, manifest in records.manifests.items():
        if not manifest.get("schedule"):
            continue
        own = (table[table["run"] == run] for table in (records.collectives, records.spans, records.steps))
        collectives, spans = in_timed_steps(*own)
        schedule = Schedule.from_csv(manifest["schedule"])
        why, measured, foretold = "", nan, nan
        try:
            measured, foretold = medians(pipelined_steps(collectives, spans, manifest["mesh"]))
        except (ValueError, ArithmeticError) as error:  # as of a run that was cut off
            why = str(error)
        most = max(map(schedule.held, range(len(schedule.ranks))))
        rows[run] = dict(zip(COLUMNS, (measured, foretold, play(schedule, SLOTS).bubble, most, why), strict=True))
    return pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS)


def bubble_of(run: str, table: pd.DataFrame) -> dict[str, Any]:
    """The columns of ``summary.json`` on a run's row of ``bubbles``, null where missing; none of a run without one."""
    own = table.loc[run].to_dict() if run in table.index else {}
    return {str(name): None if value == "" or pd.isna(value) else value for name, value in own.items()}


def readable_bubbles(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``bubbles`` for people, in percent."""
    shares = dict(zip(COLUMNS, ("waiting (%)", "foretold (%)", "by the list alone (%)"), strict=False))
    shown = {label: (100 * table[name]).round(1) for name, label in shares.items()}
    return pd.DataFrame({"strategy": table.index, **shown, "micro-batches held": table["in_flight"].map("{:g}".format)})


def bubble_line(table: pd.DataFrame) -> str:
    """The rows of ``bubbles`` in words; empty without any."""
    said = []
    for run, row in table.iterrows():
        even, held = format_percent(row["even_bubble"]), f"holds {row['in_flight']:g} micro-batches"
        alone = f"of equal stages without messages {even}; {held}"
        if row["bubble_unknown"]:
            said.append(f"{run}: not known, because of {row['bubble_unknown']} ({alone})")
        else:
            measured, foretold = map(format_percent, row[["bubble", "foretold_bubble"]])
            said.append(f"{run} {measured} (foretold {foretold}, {alone})")
    return f"ranks wait for other stages: {', '.join(said)}" if said else ""
