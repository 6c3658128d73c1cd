"""Who waited for whom: the time of each collective, split into queueing, waiting for the last rank, and transfer.

On each rank, with ``last`` the moment the last rank of the group began::

    issue ── queued ── start ── straggler ── last ── transfer ── end

Queued: the queue was busy with earlier collectives (on a GPU also: the host issued it before the computing stream came
to it). Straggler: the transport had begun, but some rank had not joined
yet. Bytes move only in the transfer. What a rank loses to the straggler is the part of that time it spends in ``wait``.

Why the last rank was late, its spans say: it computed, it was off the CPU (it slept, or its core ran something else),
or neither: it loaded data, waited for a collective of another axis, or was between the spans.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, intersect, total
from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.overlap import NONE, computing, off_cpu
from shardlab.analysis.rows import Key, bounds, numbers
from shardlab.tables import SPANS

KEPT = ["run", "source", "step", "axis", "group", "seq", "op", "tag", "rank", "last_rank", "start_us"]


def waits(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Queueing, straggler and transfer time of every collective on every rank.

    Broadcasts, sends and receives are left out: who waits depends on the root, which a record does not name.

    Args:
        collectives: table ``collectives``.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per collective and rank: its columns, ``last_rank`` (the last to join), ``queued_us``, ``straggler_us``
        (0 on the last rank), ``transfer_us``; ``waited_us`` (the caller's time in ``wait``), and of it
        ``waited_for_last_us``, the part before the last rank joined.

    Raises:
        ValueError: see ``matched_collectives``.
    """
    rows = matched_collectives(collectives, axes)
    issued = bounds(rows, "issue_us", "start_us", "collectives")
    start, end = numbers(rows, "start_us"), numbers(rows, "end_us")
    joined = np.clip(numbers(rows, "last_us"), start, end)
    waited = rows["wait_start_us"].notna().to_numpy(dtype=np.bool_)
    bounds(rows[waited], "wait_start_us", "wait_end_us", "collectives")
    wait_start, wait_end = (np.where(waited, numbers(rows, name), 0.0) for name in ("wait_start_us", "wait_end_us"))
    return rows[KEPT].assign(
        queued_us=issued[:, 1] - issued[:, 0],
        straggler_us=joined - start,
        transfer_us=end - joined,
        waited_us=wait_end - wait_start,
        waited_for_last_us=np.maximum(0.0, np.minimum(wait_end, joined) - np.maximum(wait_start, start)),
    )


def stragglers(
    collectives: pd.DataFrame, axes: Mapping[str, int] | None = None, *, spans: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Which rank waited for which, summed over the collectives, and what the last rank did meanwhile.

    Args:
        collectives: table ``collectives``.
        axes: sizes of the axes of the mesh, see ``with_group``.
        spans: table ``spans``; None leaves out what the last rank did.

    Returns:
        One row per run and pair of ranks: ``rank`` waited for ``last_rank`` in ``num_collectives``, for
        ``straggler_us`` in total, of which it spent ``waited_for_last_us`` in ``wait``. With ``spans`` also, of
        ``straggler_us``, for how long the last rank computed (``last_computed_us``) and for how long it was off the CPU
        (``last_off_cpu_us``, 0 where that is not recorded).

    Raises:
        ValueError: see ``matched_collectives``; or ``spans`` is not table ``spans``.
    """
    rows = waits(collectives, axes)
    rows = rows[rows["rank"] != rows["last_rank"]]
    sums = {name: (name, "sum") for name in ("straggler_us", "waited_for_last_us")}
    if spans is not None:
        SPANS.check(spans)
        doing = {"last_computed_us": computing(collectives, spans), "last_off_cpu_us": off_cpu(spans)}
        rows = rows.assign(**{name: _of_last_rank(rows, times) for name, times in doing.items()})
        sums |= {name: (name, "sum") for name in doing}
    pairs = rows.groupby(["run", "source", "rank", "last_rank"])
    return pairs.agg(num_collectives=("seq", "size"), **sums).reset_index()


def _of_last_rank(rows: pd.DataFrame, times: Mapping[Key, Intervals]) -> list[float]:
    """For how long ``times`` of the last rank lie in the time that each row's rank waited for it."""
    keys = zip(
        *(rows[name] for name in ("run", "source", "last_rank", "step", "start_us", "straggler_us")), strict=True
    )
    return [
        total(intersect([(start, start + late)], times.get((str(run), str(source), int(last), int(step)), NONE)))
        for run, source, last, step, start, late in keys
    ]
