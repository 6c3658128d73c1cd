"""Overlap: the share of communication time that compute hides, as Holistic Trace Analysis defines it.

On each rank, with the intervals of communication merged (M) and those of compute merged (C)::

    overlap = |M and C| / |M|          exposed = |M| - |M and C|

``overlap`` gives both for each step: M is what the step issued, C the compute of all steps, since what is sent at the
end of one step may travel behind the next. The share of several steps is that of their sums (``hidden_by_rank``) and
not an average of shares: a long step weighs more. (HTA gives one share for a trace, without its last step.)

Without communication there is no overlap (NaN): it is neither 0 nor 1. There is no overlap and no exposed time either
where a stream ran a collective whose wait was not seen. Compute is forward, backward, recomputation and optimizer work;
spans nest, and merging counts each moment once. A rank in ``wait`` does not compute although the span of the
surrounding module is open. These waits are removed from C; otherwise a fully exposed gather inside a forward pass would
count as hidden. Nor does a rank compute that is off the CPU, because it sleeps or because its core runs
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
from shardlab.analysis.rows import KEYS, Key, bounds, in_timed_steps, labelled, numbers, on_streams, positions
from shardlab.records.tables import COLLECTIVES, SPANS, STEPS
from shardlab.vocabulary import COMPUTE_KINDS, WHOLE_MODEL, Phase, SpanKind

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
        intervals of the step), ``both_us``, ``overlap`` (0 to 1; NaN without communication), ``exposed_us``. The last
        three are NaN where a stream's wait was not seen.
        Runs come in order of first appearance, first among the spans.

    Raises:
        ValueError: columns are missing, a time is missing, or an interval ends before it begins.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    return _overlap(collectives, spans, _by_step(collectives, bounds(collectives, "start_us", "end_us", "collectives")))


def _overlap(collectives: pd.DataFrame, spans: pd.DataFrame, communication: Mapping[Key, Intervals]) -> pd.DataFrame:
    compute = computing(collectives, spans)
    of_ranks = _of_ranks(compute)
    keys = dict.fromkeys([*positions(spans), *communication])
    order = {name: place for place, name in enumerate(dict.fromkeys(key[:2] for key in keys))}
    unseen = collectives[on_streams(collectives) & collectives["wait_start_us"].isna()]
    # (A profiler's trace has kernels in place of the model's spans, and in a kernel nobody waits.)
    unknown = set(positions(unseen)) & set(positions(spans[spans["unit"] == WHOLE_MODEL]))
    rows = []
    for key in sorted(keys, key=lambda key: (order[key[:2]], key)):
        merged = merge(communication.get(key, NONE))
        hidden_us = total(intersect(merged, _near(of_ranks.get(key[:3], NONE), merged)))
        comm_us, both_us = total(merged), hidden_us if key not in unknown else float("nan")
        share = both_us / comm_us if comm_us else float("nan")
        rows.append((*key, comm_us, total(compute.get(key, NONE)), both_us, share, comm_us - both_us))
    columns = [*KEYS, "comm_us", "compute_us", "both_us", "overlap", "exposed_us"]
    return pd.DataFrame(rows, columns=columns)


def hidden_by_rank(measures: pd.DataFrame) -> pd.DataFrame:
    """The overlap of each rank over all its steps together: hidden time over time in communication.

    What figures, summaries and verdicts call "hidden" is its median over ranks. (Should a rank communicate for two
    steps at once, that moment counts for both.)

    Args:
        measures: rows of ``overlap``: columns ``run``, ``source``, ``rank``, ``comm_us``, ``both_us``.

    Returns:
        ``run``, ``source``, ``rank``, ``overlap``: 0 to 1, NaN without communication or where it is not known.
    """
    of_ranks = measures.groupby(["run", "source", "rank"], sort=False)
    sums, are_known = of_ranks[["both_us", "comm_us"]].sum(), of_ranks["both_us"].count() == of_ranks.size()
    share = (sums["both_us"] / sums["comm_us"]).where(are_known)  # (0 / 0 is NaN)
    return share.rename("overlap").reset_index()


def hidden_by_run(measures: pd.DataFrame) -> pd.DataFrame:
    """What a figure or a sentence says of each run, without the setup (step -1).

    Args:
        measures: rows of ``overlap``.

    Returns:
        By label (see ``labelled``): ``comm_us``, ``both_us``, ``exposed_us`` (medians over steps, of each step's median
        over ranks, so the second and the third need not add up to the first), and ``overlap`` (the median over ranks
        of ``hidden_by_rank``).
    """
    rows = labelled(measures[measures["step"] >= 0])
    by_step = rows.groupby(["label", "step"], sort=False)[["comm_us", "both_us", "exposed_us"]].median()
    found = by_step.groupby("label", sort=False).median()
    return found.assign(overlap=labelled(hidden_by_rank(rows)).groupby("label")["overlap"].median())


def host_waits(collectives: pd.DataFrame) -> dict[Key, Intervals]:
    """When the caller on each rank waited for a collective."""
    waited = collectives[collectives["wait_start_us"].notna()]
    return _by_step(waited, bounds(waited, "wait_start_us", "wait_end_us", "collectives"))


def computing(collectives: pd.DataFrame, spans: pd.DataFrame) -> dict[Key, Intervals]:
    """When each rank computed: inside a span of compute and not in ``wait``."""
    worked, waits = compute_spans(spans), _of_ranks(host_waits(collectives))
    times = _by_step(worked, bounds(worked, "start_us", "end_us", "spans"))
    return {key: subtract(own, _near(waits.get(key[:3], NONE), own)) for key, own in times.items()}


def _of_ranks(times: Mapping[Key, Intervals]) -> dict[tuple[str, str, int], Intervals]:
    """The intervals of all steps of a rank, merged."""
    found: dict[tuple[str, str, int], list[Intervals]] = {}
    for key, own in times.items():
        found.setdefault(key[:3], []).append(own)
    return {rank: merge(np.concatenate(own)) for rank, own in found.items()}


def _near(merged: Intervals, times: Intervals) -> Intervals:
    """Those of the merged intervals that may touch ``times``: looking at all, in every step, would take too long."""
    if not len(times):
        return NONE
    first = np.searchsorted(merged[:, 1], times[:, 0].min(), side="right")
    return merged[first : np.searchsorted(merged[:, 0], times[:, 1].max())]


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
    moved = _by_step(own, bounds(own, "start_us", "end_us", "collectives"))
    # A message counts in the step in whose time it lies, whichever step has sent it.
    of_ranks = _of_ranks(moved)
    moved |= {key: _cut(of_ranks.get(key[:3], NONE), *times) for key, times in lasted.items()}
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


def _cut(merged: Intervals, begin: float, end: float) -> Intervals:
    """What lies between two times."""
    return _near(merged, np.array([[begin, end]])).clip(begin, end)


def _waiting(
    collectives: pd.DataFrame, spans: pd.DataFrame, axes: Mapping[str, int] | None,
    lasted: Mapping[Key, tuple[float, float]],
) -> dict[Key, float]:  # fmt: skip
    """Exposed time before the last rank joined, while nothing else was moving either."""
    if not len(collectives):
        return {}
    rows = matched_collectives(collectives, axes)
    times = bounds(rows, "start_us", "end_us", "collectives")
    joined = np.clip(numbers(rows, "last_us"), times[:, 0], times[:, 1])
    early, moving = np.column_stack((times[:, 0], joined)), np.column_stack((joined, times[:, 1]))
    compute = _of_ranks(computing(collectives, spans))
    waiting = {
        key: _cut(subtract(early[here], moving[here]), *lasted.get(key, _EVER)) for key, here in positions(rows).items()
    }
    return {key: total(subtract(own, _near(compute.get(key[:3], NONE), own))) for key, own in waiting.items()}


def hidden_share(collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """``hidden_by_rank`` over the steps whose times count, taken as one: a moment in which two communicate counts once.

    Holistic Trace Analysis finds the same in files of these steps, to their whole microseconds (``tests/export``).

    Args:
        collectives, spans, steps: the tables.

    Returns:
        ``run``, ``source``, ``rank``, ``overlap``: 0 to 1, NaN without communication or where it is not known.

    Raises:
        ValueError: see ``overlap``.
    """
    together = (table.assign(step=0) for table in in_timed_steps(collectives, spans, steps))
    return hidden_by_rank(overlap(*together))
