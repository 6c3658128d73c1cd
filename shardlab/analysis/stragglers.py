"""Who waited for whom: the time of a collective split into queueing, waiting for the last rank, and the transfer.

On each rank, with ``last`` the moment the last rank of the group began::

    issue ── queued ── start ── straggler ── last ── transfer ── end

Queued: the lane was busy with the collectives before it. Straggler: the transport had begun, but some rank had not come
yet. Only then do bytes move. What the rank itself lost by it is the part of the straggler time it spent in ``wait``.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.rows import bounds, numbers

KEPT = ["run", "source", "step", "axis", "group", "seq", "op", "tag", "rank", "last_rank"]


def waits(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Queueing, straggler and transfer time of every collective on every rank.

    Broadcasts, sends and receives are left out: who waits there depends on the root, which a record does not name.

    Args:
        collectives: table ``collectives``.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per collective and rank: what it was, ``last_rank`` (who came last), ``queued_us``, ``straggler_us``
        (0 on the last rank), ``transfer_us``; ``waited_us`` that the caller sat in ``wait``, and of it
        ``waited_for_last_us`` before the last rank had come.

    Raises:
        ValueError: see ``matched_collectives``.
    """
    rows = matched_collectives(collectives, axes)
    issued = bounds(rows, "issue_us", "start_us", "collectives")
    start, end = numbers(rows, "start_us"), numbers(rows, "end_us")
    come = np.clip(numbers(rows, "last_us"), start, end)
    waited = rows["wait_start_us"].notna().to_numpy(dtype=np.bool_)
    bounds(rows[waited], "wait_start_us", "wait_end_us", "collectives")
    wait_start, wait_end = (np.where(waited, numbers(rows, name), 0.0) for name in ("wait_start_us", "wait_end_us"))
    return rows[KEPT].assign(
        queued_us=issued[:, 1] - issued[:, 0],
        straggler_us=come - start,
        transfer_us=end - come,
        waited_us=wait_end - wait_start,
        waited_for_last_us=np.maximum(0.0, np.minimum(wait_end, come) - np.maximum(wait_start, start)),
    )


def stragglers(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Which rank waited for which, summed over the collectives.

    Returns:
        One row per run and pair of ranks: ``rank`` waited for ``last_rank`` in ``num_collectives``, for
        ``straggler_us`` in all, of which it sat in ``wait`` for ``waited_for_last_us``.

    Raises:
        ValueError: see ``matched_collectives``.
    """
    rows = waits(collectives, axes)
    rows = rows[rows["rank"] != rows["last_rank"]]
    pairs = rows.groupby(["run", "source", "rank", "last_rank"])
    return pairs.agg(
        num_collectives=("seq", "size"),
        straggler_us=("straggler_us", "sum"),
        waited_for_last_us=("waited_for_last_us", "sum"),
    ).reset_index()
