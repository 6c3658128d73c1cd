"""Where the time of a step goes on each rank: compute, waiting for others, bytes on their way, and the rest.

Exposed communication is time in which a collective runs and its rank does not compute (``analysis.overlap``). It has
two causes with two cures, so it is cut where the last rank of the group begins the collective::

    start ── waiting: some rank has not come ── last ── moving: the link is at work ── end

A faster link shortens what moves, an even distribution of the work what waits. With what is outside of all spans (data,
Python between the spans) the four parts add up to the step.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, subtract, total
from shardlab.analysis.overlap import COMPUTE_KINDS, overlap
from shardlab.analysis.rows import KEYS, Key, bounds, numbers, positions
from shardlab.analysis.together import together
from shardlab.tables import COLLECTIVES, SPANS, STEPS
from shardlab.vocabulary import Phase

PARTS = ("compute_us", "moving_us", "waiting_us", "other_us")
NONE: Intervals = np.empty((0, 2))


def step_split(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """The parts of every step on every rank.

    Args:
        collectives: table ``collectives``, the rows of all ranks; those of the report's own loss are left out, as
            ``step_us`` ends before it.
        spans: table ``spans``.
        steps: table ``steps``.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per (run, source, rank, step) of ``steps``: ``step_us`` and its parts ``compute_us``, ``moving_us``,
        ``waiting_us``, ``other_us``.

    Raises:
        ValueError: columns or times are missing or cannot be true; see ``overlap`` and ``together``.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    STEPS.check(steps)
    own = collectives[collectives["phase"] != str(Phase.METRICS)]
    table = steps[[*KEYS, "step_us"]].merge(overlap(own, spans), on=KEYS, how="left")
    waiting = _waiting(own, spans, axes)
    keys = [(str(run), str(source), int(rank), int(step)) for run, source, rank, step in table[KEYS].to_numpy()]
    table["waiting_us"] = [waiting.get(key, 0.0) for key in keys]
    table["moving_us"] = table["exposed_us"] - table["waiting_us"]
    table["other_us"] = table["step_us"] - table["compute_us"] - table["exposed_us"]
    return table[[*KEYS, "step_us", *PARTS]]


def _waiting(collectives: pd.DataFrame, spans: pd.DataFrame, axes: Mapping[str, int] | None) -> dict[Key, float]:
    """Exposed time before the last rank had come, while nothing else was moving either."""
    if not len(collectives):
        return {}
    rows = together(collectives, axes)
    times = bounds(rows, "start_us", "end_us", "collectives")
    come = np.clip(numbers(rows, "last_us"), times[:, 0], times[:, 1])
    early, moving = np.column_stack((times[:, 0], come)), np.column_stack((come, times[:, 1]))
    compute = _compute(collectives, spans)
    return {
        key: total(subtract(subtract(early[here], moving[here]), compute.get(key, NONE)))
        for key, here in positions(rows).items()
    }


def _compute(collectives: pd.DataFrame, spans: pd.DataFrame) -> dict[Key, Intervals]:
    """When each rank computed: inside a span and not in ``wait``."""
    worked = spans[spans["kind"].isin([str(kind) for kind in COMPUTE_KINDS])]
    times = bounds(worked, "start_us", "end_us", "spans")
    waited = collectives[collectives["wait_start_us"].notna()]
    waits = bounds(waited, "wait_start_us", "wait_end_us", "collectives")
    of_waits = positions(waited)
    return {
        key: subtract(times[here], waits[of_waits[key]] if key in of_waits else NONE)
        for key, here in positions(worked).items()
    }
