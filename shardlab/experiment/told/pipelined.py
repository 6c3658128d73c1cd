"""What is said of pipelines: what a plan's ranks hold, send and wait for, and how long recorded ones have waited.

A plan says it by the list of actions and the shapes, without ranks.
"""

from collections.abc import Mapping
from math import nan
from typing import Any

import pandas as pd

from shardlab.analysis.held_bytes import by_column
from shardlab.analysis.rows import in_timed_steps
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.plan import Plan
from shardlab.experiment.trained.pipelined import SLOTS
from shardlab.plots.text import format_percent
from shardlab.records.store import Records
from shardlab.schedules import Schedule, play
from shardlab.vocabulary import Collective, MeshAxis
from shardlab.why.pipelined import medians, pipelined_steps

BUBBLES = (
    "Pipelines: how long ranks wait for other stages, from the first action of any to the last of all: measured, "
    "foretold by the list of actions with the recorded times of work and messages, and by the list alone, of equal "
    "stages."
)

COLUMNS = ["bubble", "foretold_bubble", "even_bubble", "in_flight", "bubble_unknown"]
PLANNED = ["strategy", "rank", "stages", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "in_flight", "idle",
           "messages", "sent_bytes"]  # fmt: skip


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


def stages_of(config: CompareConfig, plans: Mapping[str, Plan]) -> pd.DataFrame:
    """One row per run with a schedule and rank of its pipeline; of data ranks of one place, which are alike, the first.

    Args:
        config: of the plans.
        plans: by run.

    Returns:
        ``strategy`` (the run), ``rank``, ``stages`` (their numbers), bytes of parameters, gradients and optimizer state
        at rest, ``in_flight`` (see ``Schedule.held``), ``idle`` (share of the schedule's time, if stages
        are equal, backward takes twice as long as forward and messages take no time), ``messages`` sent to other stages
        in a step, and ``sent_bytes`` in them; missing where messages are not known.
    """
    rows: list[dict[Any, Any]] = []
    for run, plan in plans.items():
        if (staged := config.staged_of(run)) is None:
            continue
        schedule, played, held = staged.schedule, play(staged.schedule, SLOTS), by_column(plan.memory, ["rank"])
        for place, idle in enumerate(played.idle):
            rank = place * config.data_ranks
            own = [str(stage) for stage, of_rank in schedule.rank_of.items() if of_rank == place]
            rows.append(
                {"strategy": run, "rank": rank, "stages": ", ".join(own), **held.loc[rank].to_dict(),
                 "in_flight": schedule.held(place), "idle": idle / played.seconds, **_sent(plan.collectives, rank)}
            )  # fmt: skip
    return pd.DataFrame(rows, columns=PLANNED).astype({"messages": "Int64", "sent_bytes": "Float64"})


def _sent(collectives: pd.DataFrame | None, rank: int) -> dict[str, float | None]:
    if collectives is None:
        return {"messages": None, "sent_bytes": None}
    own = collectives[(collectives["rank"] == rank) & (collectives["axis"] == str(MeshAxis.PIPE))]
    own = own[own["op"] == str(Collective.SEND)]
    return {"messages": len(own), "sent_bytes": float(own["bytes"].sum())}


def idle_line(stages: pd.DataFrame) -> str:
    """How much of the ranks' time each schedule leaves idle, in words."""
    found: dict[str, str] = {}
    for run, own in stages.groupby("strategy", sort=False):
        share, held = format_percent(float(own["idle"].mean())), ", ".join(map("{:g}".format, own["in_flight"]))
        found.setdefault(str(run).rpartition("+")[2], f"{share} (micro-batches held by rank: {held})")
    said = ", ".join(f"{name} {share}" for name, share in found.items())
    return f"{said}: idle, if stages are equal, backward takes twice as long as forward, and messages no time"
