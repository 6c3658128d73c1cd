"""Causes of a long step in what the hosts do: more than it has to be, on one rank, beside messages, or off the CPU."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isnan
from statistics import median
from typing import Any, cast

import numpy as np

from shardlab.analysis.intervals import Intervals, covered_until, merge, subtract, total
from shardlab.analysis.matching import SAME, matched_collectives
from shardlab.analysis.rows import numbers
from shardlab.partition.step_program import Item, Program, Work
from shardlab.vocabulary import COMPUTE_KINDS, WHOLE_MODEL, SpanKind
from shardlab.why.judged_steps import Found, Recorded, Steps, in_ms
from shardlab.why.recorded_step import NOTHING, Removed, by_rank

OFF_CPU, OPTIMIZER = "off the CPU", "optimizer step"
SAME_RANK = 0.6  # of the meetings
NOTICED = 0.01  # of a step: by how much the last rank of a meeting must be late
BESIDE_MOST = 0.1  # of the latest meeting of its step: what is less is chance beside it
BESIDE, APART = 0.5, 0.1  # shares of a span beside messages, from which and up to which it counts as slowed and not
FEWEST_SPANS = 3
LOAD_AHEAD = "load ahead of the step, by more workers of a DataLoader,"
# What the hosts do beside forward and backward, how it is said, what to do about it, and from which share of a step on
# it counts: some of the optimizer's is left in any case.
IN_SPANS = (
    ("input wait", SpanKind.DATA, "loading data takes", LOAD_AHEAD, 0.1),
    ("recomputation", SpanKind.RECOMPUTE, "computing activations again takes", "no checkpointing, or of less", 0.1),
    (OPTIMIZER, SpanKind.OPTIMIZER, "optimizer and clipping take", "fused=True or a cheaper one, at most,", 0.2),
)


def found(record: Recorded) -> Iterator[Found]:
    """Those of the hosts; the time off the CPU is what is left beside a straggler."""
    yield from _in_spans(record)
    yield from _contention(record)
    levelled = record.steps
    for straggler in _straggler(record):
        levelled = straggler.changed
        yield straggler
    away = record.of_kind(SpanKind.OFF_CPU)
    # Of a straggler's time off the CPU only what the others have too.
    changed = [step.without(away) for step in levelled]
    said, change = _why_away(record, away)
    yield Found(OFF_CPU, changed, said, change, base=levelled)


def _why_away(record: Recorded, away: Removed) -> tuple[str, str]:
    """Whether ranks that are off the CPU sleep, or could run and have no core; and what to do about it."""
    said = f"in {in_ms(record.lost_us(away))} of a step a rank is off the CPU"
    one = "a core for each rank and thread" if len(record.steps[0].programs) > 1 else "a core for each thread"
    cores = f"{one}, with no other program beside them,"
    queued = record.queued_us / max(record.us_of(away), 1e-9)
    if isnan(queued):
        return f"{said}: it sleeps, or others have its core", f"no sleep, or {cores}"
    if queued >= 0.5:
        return f"{said}: for {100 * queued:.0f} % of that it could run, and others have its core", cores
    return (
        f"{said}: for {100 * (1 - queued):.0f} % of that it sleeps",
        "nothing that sleeps in a step (a lock, a file, a pause, a thread that waits for another)",
    )


def _in_spans(record: Recorded) -> Iterator[Found]:
    """What the hosts did beside forward and backward."""
    for name, kind, words, change, least in IN_SPANS:
        removed = record.of_kind(kind)
        said = f"{words} {in_ms(record.lost_us(removed))} of a step"
        yield Found(name, record.without(removed), said, change, least=least)
    open_us = record.of_kind(*SpanKind)
    outside = {}
    for rank, own in by_rank(record.timed).items():
        times = np.column_stack((numbers(own, "start_us"), numbers(own, "start_us") + numbers(own, "step_us")))
        outside[rank] = subtract(times, open_us.get(rank, NOTHING))
        outside[rank] = merge(np.concatenate((outside[rank], record.dispatch.get(rank, NOTHING))))
    changed = record.without(outside)
    said = f"{in_ms(np.median(record.gains(changed)))} of a step are Python between the operations"
    yield Found("host-bound", changed, said, "larger micro-batches, or torch.compile")


def _straggler(record: Recorded) -> Iterator[Found]:
    """The rank that is last again and again, and the steps with its work as long as that of the others."""
    if record.collectives.empty:
        return
    rows = matched_collectives(record.collectives, record.axes)
    meetings = rows.groupby(SAME).agg(
        late_us=("start_us", lambda times: np.diff(np.sort(times)[-2:]).sum()),
        last=("last_rank", "first"), last_us=("start_us", "max"),
    )  # fmt: skip
    most_us = meetings.groupby("step")["late_us"].transform("max")
    meetings = meetings[meetings["late_us"] > np.maximum(NOTICED * record.us, BESIDE_MOST * most_us)].reset_index()
    if len(meetings) < len(record.steps):
        return
    rank = int(meetings["last"].mode()[0])
    own = meetings[meetings["last"] == rank]
    late_us, share = own["late_us"].sum(), len(own) / len(meetings)
    # Also by time: of many meetings at which somebody is a little late, one rank is last by chance.
    if min(share, late_us / meetings["late_us"].sum(), own["step"].nunique() / len(record.steps)) <= SAME_RANK:
        return
    # Where several messages wait at once, that is one wait.
    by = total(np.column_stack((own["last_us"] - own["late_us"], own["last_us"]))) / len(record.steps) / 1e3
    said = f"rank {rank} is last in {100 * share:.0f} % of {len(meetings)} meetings, by {by:.3g} ms a step"
    longer = _longer(record, rank)
    kind = max(longer, key=lambda kind: longer[kind])
    if longer[kind] > NOTICED * record.us:  # else it is late between the spans
        said += f"; its {kind.replace('_', ' ')} is {in_ms(longer[kind])} longer than that of the others"
    yield Found("straggler", _levelled(record.steps, rank), said, f"give rank {rank} as much to do as the others")


def _longer(record: Recorded, rank: int) -> dict[str, float]:
    """By kind of span, how much longer it takes on a rank, in microseconds a step."""
    found = {}
    for kind in SpanKind:
        us = {one: total(times) for one, times in record.of_kind(kind, on_cpu=True).items()}
        others = [us.get(one, 0.0) for one in record.steps[0].programs if one != rank]
        found[str(kind)] = (us.get(rank, 0.0) - median(others)) / len(record.steps)
    return found


def _levelled(steps: Steps, rank: int) -> Steps:
    """With all work of the rank as long as that of the others in the same place, in the median over the steps."""
    us: dict[int, Any] = {}
    for one in steps[0].programs:
        us[one] = [[item.us for item in step.programs[one] if isinstance(item, Work)] for step in steps]
    if len({len(work) for works in us.values() for work in works}) > 1:
        return _shortened(steps, rank, {one: sum(map(sum, works)) for one, works in us.items()})
    own = np.median(us.pop(rank), axis=0)
    more = (np.median(np.concatenate(list(us.values())), axis=0) - own).tolist()

    def levelled(one: int, items: Program) -> Iterator[Item]:
        left = iter(more)
        for item in items:
            if isinstance(item, Work) and one == rank:
                item = replace(item, us=max(0.0, item.us + next(left)))
            yield item

    return [step.each(levelled) for step in steps]


def _shortened(steps: Steps, rank: int, us: Mapping[int, float]) -> Steps:
    """With all work of the rank shorter by one factor, so that in sum it is as the others'."""
    factor = min(1.0, median(us[one] for one in us if one != rank) / us[rank])
    return [step.with_work(lambda own, work: (factor if own == rank else 1.0) * work.us) for step in steps]


def _contention(record: Recorded) -> Iterator[Found]:
    """What units that are alike take longer beside messages."""
    spans = record.spans[(record.spans["unit"] != WHOLE_MODEL) & record.spans["kind"].isin(map(str, COMPUTE_KINDS))]
    moving = {rank: own[["start_us", "end_us"]].to_numpy() for rank, own in by_rank(record.collectives).items()}
    kinds: dict[tuple[str, str], list[tuple[int, Intervals, float, float]]] = {}
    for rank, of_rank in by_rank(spans).items():
        times = of_rank[["start_us", "end_us"]].to_numpy(dtype=np.float64)
        hidden = np.diff(covered_until(moving.get(rank, NOTHING), times)).ravel()
        for key, rows in of_rank.groupby(["step", "unit", "kind"], sort=False).indices.items():
            _, unit, kind = cast(tuple[int, str, str], key)
            if us := float(np.diff(times[rows]).sum()):
                share = float(hidden[rows].sum()) / us
                kinds.setdefault((re.sub(r"\d+", "*", str(unit)), str(kind)), []).append((rank, times[rows], us, share))
    slower: dict[int, list[Intervals]] = {}
    for alike in kinds.values():
        beside = [us for _, _, us, share in alike if share >= BESIDE]
        apart = [us for _, _, us, share in alike if share <= APART]
        if min(len(beside), len(apart)) >= FEWEST_SPANS and median(beside) > median(apart):
            less = 1 - median(apart) / median(beside)
            for rank, times, _, share in alike:
                if share >= BESIDE:
                    ends = times[:, 1]
                    slower.setdefault(rank, []).append(np.column_stack((ends - less * (ends - times[:, 0]), ends)))
    removed = {rank: merge(np.concatenate(times)) for rank, times in slower.items()}
    said = f"units take {in_ms(record.lost_us(removed))} of a step longer beside messages than without"
    yield Found("contention", record.without(removed), said, "one core left free of compute")
