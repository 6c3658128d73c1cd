"""Which compute hid which collective, and how much of it stayed exposed.

A moment of a collective is hidden if its rank computes at that moment, and neither waits nor is off the CPU (see
``overlap``). It is hidden by the innermost span that is open then: by a block rather than by the model around it.
Collectives that are in flight together each count in full here, so their exposed times can add up to more than the
exposed time of the step, which counts each moment once.

And who waited for whom: the time of each collective, split into queueing, waiting for the last rank, and transfer.

On each rank, with ``last`` the moment the last rank of the group began::

    issue ── queued ── start ── straggler ── last ── transfer ── end

Queued: the queue was busy with earlier collectives (on a GPU also: the host issued it before the computing stream came
to it). Straggler: the transport had begun, but some rank had not joined
yet. Bytes move only in the transfer. What a rank loses to the straggler is the part of that time it spends in ``wait``.

Why the last rank was late, its spans say: it computed, it was off the CPU (it slept, or its core ran something else),
or neither: it loaded data, waited for a collective of another axis, or was between the spans.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, innermost, intersect, total
from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.overlap import NONE, compute_spans, computing, host_waits, off_cpu
from shardlab.analysis.rows import KEYS, Key, bounds, numbers, positions
from shardlab.records.tables import COLLECTIVES, SPANS

IDENTITY = [*KEYS, "seq", "axis", "op", "tag"]
KEPT = ["run", "source", "step", "axis", "group", "seq", "op", "tag", "rank", "last_rank", "start_us"]


def hidden_by(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """How long each unit hid each collective.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``; neither data loading nor time off the CPU counts as compute.

    Returns:
        One row per collective and unit that computed during it: the keys, ``seq``, ``axis``, ``op``, ``tag``, ``unit``,
        ``kind`` and ``hidden_us``. A collective that stayed exposed has no row.

    Raises:
        ValueError: columns or times are missing, or an interval ends before it begins.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    spans = compute_spans(spans)
    span_times = bounds(spans, "start_us", "end_us", "spans")
    comm_times = bounds(collectives, "start_us", "end_us", "collectives")
    waits = host_waits(collectives)
    of_spans, found = positions(spans), []
    for key, here in positions(collectives).items():
        mine = of_spans.get(key)
        if mine is None:
            continue
        pieces, owners = innermost(span_times[mine], waits.get(key, NONE))
        found += [(here[row], mine[owner], us) for row, owner, us in _shares(comm_times[here], pieces, owners.tolist())]
    return _table(collectives, spans, found)


def attribution(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """How much of each collective was hidden behind compute, and which unit hid most of it.

    Returns:
        One row per collective: the keys, ``seq``, ``axis``, ``op``, ``tag``, ``duration_us``, ``hidden_us``,
        ``exposed_us``, ``hidden`` (share of the duration; NaN where it took no time), and ``unit``, ``kind`` and
        ``unit_us`` of the unit that hid most of it (NA where nothing did).

    Raises:
        ValueError: see ``hidden_by``.
    """
    shares = hidden_by(collectives, spans)
    most = shares.sort_values("hidden_us", ascending=False, kind="stable").drop_duplicates([*KEYS, "seq"])
    most = most[[*KEYS, "seq", "unit", "kind", "hidden_us"]].rename(columns={"hidden_us": "unit_us"})
    sums = shares.groupby([*KEYS, "seq"])["hidden_us"].sum().reset_index()
    times = bounds(collectives, "start_us", "end_us", "collectives")
    table = collectives[IDENTITY].assign(duration_us=times[:, 1] - times[:, 0])
    table = table.merge(sums, on=[*KEYS, "seq"], how="left")
    table["hidden_us"] = table["hidden_us"].astype("float64").fillna(0.0)
    table["exposed_us"] = table["duration_us"] - table["hidden_us"]
    table["hidden"] = (table["hidden_us"] / table["duration_us"]).where(table["duration_us"] > 0)
    return table.merge(most, on=[*KEYS, "seq"], how="left")


def _shares(collectives: Intervals, pieces: Intervals, owners: list[int]) -> Iterator[tuple[int, int, float]]:
    """(collective, span, microseconds) for each overlap of the two; ``pieces`` are disjoint and sorted."""
    first = np.searchsorted(pieces[:, 1], collectives[:, 0], side="right")
    stop = np.searchsorted(pieces[:, 0], collectives[:, 1], side="left")
    for row, (start, end) in enumerate(collectives.tolist()):
        for place in range(first[row], stop[row]):
            common = min(end, float(pieces[place, 1])) - max(start, float(pieces[place, 0]))
            if common > 0:
                yield row, owners[place], common


def _table(collectives: pd.DataFrame, spans: pd.DataFrame, found: list[tuple[int, int, float]]) -> pd.DataFrame:
    """Rows of (collective, span, microseconds), summed by unit and kind, because waits may cut a span into pieces."""
    rows = collectives[IDENTITY].iloc[[row for row, _, _ in found]].reset_index(drop=True)
    hid = spans[["unit", "kind"]].iloc[[span for _, span, _ in found]].reset_index(drop=True)
    table = rows.join(hid).assign(hidden_us=np.array([us for _, _, us in found], dtype=np.float64))
    return table.groupby([*IDENTITY, "unit", "kind"], sort=False)["hidden_us"].sum().reset_index()


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
        queued_us=issued[:, 1] - issued[:, 0], straggler_us=joined - start, transfer_us=end - joined,
        waited_us=wait_end - wait_start,
        waited_for_last_us=np.maximum(0.0, np.minimum(wait_end, joined) - np.maximum(wait_start, start)),
    )  # fmt: skip


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
    names = ["run", "source", "last_rank", "step", "start_us", "straggler_us"]
    return [
        total(intersect([(start, start + late)], times.get((str(run), str(source), int(last), int(step)), NONE)))
        for run, source, last, step, start, late in rows[names].itertuples(index=False, name=None)
    ]
