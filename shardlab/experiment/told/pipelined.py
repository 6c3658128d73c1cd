"""What a comparison says of its pipelines: how much of the ranks' time is idle, by run, measured and foretold."""

import pandas as pd

from shardlab.analysis.timed import in_timed_steps
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


def bubbles(records: Records) -> pd.DataFrame:
    """Of each run with a schedule: shares of all ranks' time from the first action of any to the last of all.

    Returns:
        By ``run``: ``bubble``, in which ranks wait for other stages, the median of the steps that count; ``foretold``
        by the same list, from the recorded times of work and of messages; ``even``, by the list alone, if stages were
        equal, backward twice forward, and messages took no time; ``in_flight``, the most micro-batches that a rank
        holds. None of a run of which no step is whole.
    """
    rows = {}
    for run, manifest in records.manifests.items():
        if not manifest.get("schedule"):
            continue
        own = (table[table["run"] == run] for table in (records.collectives, records.spans, records.steps))
        collectives, spans = in_timed_steps(*own)
        schedule = Schedule.from_csv(manifest["schedule"])
        try:
            measured, foretold = medians(pipelined_steps(collectives, spans, manifest["mesh"]))
        except (ValueError, ArithmeticError):  # no step is whole, as where a run was cut off
            continue
        rows[run] = {
            "bubble": measured, "foretold": foretold, "even": play(schedule, SLOTS).bubble,
            "in_flight": max(map(schedule.in_flight, range(len(schedule.ranks)))),
        }  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index", columns=["bubble", "foretold", "even", "in_flight"])


def readable_bubbles(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``bubbles`` for people, in percent."""
    shares = {"bubble": "waiting (%)", "foretold": "foretold (%)", "even": "by the list alone (%)"}
    shown = {label: (100 * table[name]).round(1) for name, label in shares.items()}
    return pd.DataFrame({"strategy": table.index, **shown, "micro-batches held": table["in_flight"].astype(int)})


def bubble_line(table: pd.DataFrame) -> str:
    """The rows of ``bubbles`` in words; empty without any."""
    said = [
        f"{run} {format_percent(row['bubble'])} (foretold {format_percent(row['foretold'])}, of equal stages without "
        f"messages {format_percent(row['even'])}; holds {row['in_flight']:.0f} micro-batches)"
        for run, row in table.iterrows()
    ]
    return f"ranks wait for other stages: {', '.join(said)}" if said else ""
