"""What each rank of a pipeline will hold, send and wait for, by the list of actions and the shapes, without ranks."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from shardlab.analysis.held_bytes import by_column
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.plan import Plan
from shardlab.experiment.trained.pipelined import SLOTS
from shardlab.plots.text import format_percent
from shardlab.schedules import play
from shardlab.vocabulary import Collective, MeshAxis

COLUMNS = ["strategy", "rank", "stages", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "in_flight", "idle",
           "messages", "sent_bytes"]  # fmt: skip


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
    return pd.DataFrame(rows, columns=COLUMNS).astype({"messages": "Int64", "sent_bytes": "Float64"})


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
