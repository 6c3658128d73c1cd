"""Overlap: the share of communication time that compute hides, as Holistic Trace Analysis defines it.

On each rank, with the intervals of communication merged (M) and those of compute merged (C)::

    overlap = |M and C| / |M|          exposed = |M| - |M and C|

Without communication there is no overlap (NaN): it is neither 0 nor 1. There is no overlap and no exposed time either
where a stream ran a collective whose wait was not seen. Compute is forward, backward, recomputation and
optimizer work; spans nest, and merging counts each moment once. A rank in ``wait`` does not compute although the span
of the surrounding module is open. These waits are removed from C; otherwise a fully exposed gather inside a forward
pass would count as hidden. Nor does a rank compute that is off the CPU, because it sleeps or because its core runs
something else: whoever records on the CPU has taken that time out of the spans and made it spans of kind ``off_cpu``.
(On a stream nobody asks: spans are the stream's own. Traces of a profiler do not say it either.)

Exposed communication has two causes with different cures, so ``step_split`` cuts it where the last rank of the group
begins the collective::

    start ── waiting for the last rank ── last ── moving bytes over the link ── end

A faster link shortens the moving part, balanced work the waiting part. Both of them, compute, the time off the CPU
without communication, and the time outside all spans (data, Python between the spans) add up to the step.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, intersect, merge, subtract, total
from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.rows import KEYS, Key, bounds, numbers, on_streams, positions
from shardlab.tables import COLLECTIVES, SPANS, STEPS
from shardlab.vocabulary import WHOLE_MODEL, Phase, SpanKind

COMPUTE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.RECOMPUTE, SpanKind.OPTIMIZER)
PARTS = ("compute_us", "moving_us", "waiting_us", "off_cpu_us", "other_us")
NONE: Intervals = np.empty((0, 2))
_EVER = (-np.inf, np.inf)


def compute_spans(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans in which a rank computes: forward, backward, recomputation and optimizer, but not data loading."""
    return spans[spans["kind"].isin([str(kind) for kind in COMPUTE_KINDS])]


def off_cpu(spans: pd.DataFrame) -> dict[Key, Intervals]:
    """When each rank was off the CPU, as far as it was recorded."""
    away = spans[spans["kind"] == str(SpanKind.OFF_CPU)]
    return _by_step(away, bounds(away, "start_us", "end_us", "spans"))


def overlap(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """Communication, compute and their overlap for each run, rank and step.

    Args:
        collectives: table ``collectives``; every row needs ``end_us``.
        spans: table ``spans``.

    Returns:
        One row per (run, source, rank, step) of either table: ``comm_us``, ``compute_us`` (lengths of the merged
        intervals), ``both_us``, ``overlap`` (0 to 1; NaN without communication), ``exposed_us``. The last three are NaN
        where a stream's wait was not seen.
        Runs come in order of first appearance, first among the spans.

    Raises:
        ValueError: columns are missing, a time is missing, or an interval ends before it begins.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    return _overlap(collectives, spans, _by_step(collectives, bounds(collectives, "start_us", "end_us", "collectives")))


def _overlap(collectives: pd.DataFrame, spans: pd.DataFrame, communication: Mapping[Key, Intervals]) -> pd.DataFrame:
    compute = computing(collectives, spans)
    of_rank = _by_rank(compute)
    keys = dict.fromkeys([*positions(spans), *communication])
    order = {name: place for place, name in enumerate(dict.fromkeys(key[:2] for key in keys))}
    unseen = collectives[on_streams(collectives) & collectives["wait_start_us"].isna()]
    # (A profiler's trace has kernels in place of the model's spans, and in a kernel nobody waits.)
    unknown = set(positions(unseen)) & set(positions(spans[spans["unit"] == WHOLE_MODEL]))
    rows = [
        (*key, *_measure(
            communication.get(key, NONE), compute.get(key, NONE), of_rank.get(key[:3], NONE),
            is_known=key not in unknown,
        ))
        for key in sorted(keys, key=lambda key: (order[key[:2]], key))
    ]  # fmt: skip
    columns = [*KEYS, "comm_us", "compute_us", "both_us", "overlap", "exposed_us"]
    return pd.DataFrame(rows, columns=columns)


def _measure(
    communication: Intervals, compute: Intervals, of_rank: Intervals, *, is_known: bool
) -> tuple[float, float, float, float, float]:
    """(comm, compute, both, overlap, exposed) of one rank's step; all in microseconds.

    ``of_rank`` is the rank's compute in all steps, merged: that of the next step hides what this one has sent, too.
    """
    merged = merge(communication)
    beside = _cut(of_rank, merged[0, 0], merged[-1, 1]) if len(merged) else NONE
    comm_us, both_us = total(merged), total(intersect(merged, beside)) if is_known else float("nan")
    return comm_us, total(compute), both_us, both_us / comm_us if comm_us else float("nan"), comm_us - both_us


def computing(collectives: pd.DataFrame, spans: pd.DataFrame) -> dict[Key, Intervals]:
    """When each rank computed: inside a span of compute and not in ``wait``."""
    worked, waited = compute_spans(spans), collectives[collectives["wait_start_us"].notna()]
    waits = _by_step(waited, bounds(waited, "wait_start_us", "wait_end_us", "collectives"))
    times = _by_step(worked, bounds(worked, "start_us", "end_us", "spans"))
    return {key: subtract(own, waits.get(key, NONE)) for key, own in times.items()}


def _by_rank(of_steps: Mapping[Key, Intervals]) -> dict[tuple[str, str, int], Intervals]:
    """The intervals of all steps of a rank, merged."""
    found: dict[tuple[str, str, int], list[Intervals]] = {}
    for (run, source, rank, _), times in of_steps.items():
        found.setdefault((run, source, rank), []).append(times)
    return {rank: merge(np.concatenate(parts)) for rank, parts in found.items()}


def _cut(merged: Intervals, begin: float, end: float) -> Intervals:
    """What lies between two times."""
    near = merged[np.searchsorted(merged[:, 1], begin, "right") : np.searchsorted(merged[:, 0], end)]
    return near.clip(begin, end)


def _by_step(frame: pd.DataFrame, times: Intervals) -> dict[Key, Intervals]:
    return {key: times[where] for key, where in positions(frame).items()}


def step_split(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """The parts of every step on every rank.

    Args:
        collectives: table ``collectives``, the rows of all ranks. The reported loss is left out: ``step_us`` ends
            before it.
        spans: table ``spans``.
        steps: table ``steps``.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per (run, source, rank, step) of ``steps``: ``step_us`` and its parts ``compute_us``, ``moving_us``,
        ``waiting_us``, ``off_cpu_us`` (while nothing was communicated; beside communication it is exposed), and
        ``other_us``.

    Raises:
        ValueError: columns or times are missing or impossible; see ``overlap`` and ``matched_collectives``.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    STEPS.check(steps)
    own = collectives[collectives["phase"] != str(Phase.METRICS)]
    lasted = _times_of(steps)
    moved = _in_steps(_by_step(own, bounds(own, "start_us", "end_us", "collectives")), lasted)
    table = steps[[*KEYS, "step_us"]].merge(_overlap(own, spans, moved), on=KEYS, how="left")
    waiting = _waiting(own, spans, axes, lasted)
    away = {key: total(subtract(times, moved.get(key, NONE))) for key, times in off_cpu(spans).items()}
    keys = [(str(run), str(source), int(rank), int(step)) for run, source, rank, step in table[KEYS].to_numpy()]
    table["waiting_us"] = [waiting.get(key, 0.0) for key in keys]
    table["off_cpu_us"] = [away.get(key, 0.0) for key in keys]
    table["moving_us"] = table["exposed_us"] - table["waiting_us"]
    table["other_us"] = table["step_us"] - table["compute_us"] - table["exposed_us"] - table["off_cpu_us"]
    return table[[*KEYS, "step_us", *PARTS]]


def _times_of(steps: pd.DataFrame) -> dict[Key, tuple[float, float]]:
    """From when until when each step lasted; without those of older records, which do not say when steps began."""
    if "start_us" not in steps:
        return {}
    begins, lengths = numbers(steps, "start_us"), numbers(steps, "step_us")
    return {
        key: (begins[row], begins[row] + lengths[row])
        for key, (row, *_) in positions(steps).items() if not np.isnan(begins[row])
    }  # fmt: skip


def _in_steps(moved: Mapping[Key, Intervals], lasted: Mapping[Key, tuple[float, float]]) -> dict[Key, Intervals]:
    """Communication in the step in whose time it lies, whichever step has sent it."""
    of_rank = _by_rank(moved)
    return {**moved, **{key: _cut(of_rank.get(key[:3], NONE), *times) for key, times in lasted.items()}}


def _waiting(
    collectives: pd.DataFrame,
    spans: pd.DataFrame,
    axes: Mapping[str, int] | None,
    lasted: Mapping[Key, tuple[float, float]],
) -> dict[Key, float]:
    """Exposed time before the last rank joined, while nothing else was moving either."""
    if not len(collectives):
        return {}
    rows = matched_collectives(collectives, axes)
    times = bounds(rows, "start_us", "end_us", "collectives")
    joined = np.clip(numbers(rows, "last_us"), times[:, 0], times[:, 1])
    early, moving = np.column_stack((times[:, 0], joined)), np.column_stack((joined, times[:, 1]))
    compute = computing(collectives, spans)
    return {
        key: total(_cut(subtract(subtract(early[here], moving[here]), compute.get(key, NONE)), *lasted.get(key, _EVER)))
        for key, here in positions(rows).items()
    }
