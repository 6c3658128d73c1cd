"""Causes of a long step in a pipeline: ranks that wait because of the order of the actions, or for a longer stage."""

from collections.abc import Callable, Iterator
from statistics import median

import numpy as np

from shardlab.partition.step_program import Work
from shardlab.schedules import Action, Schedule, programs
from shardlab.why.judged_steps import Found, Recorded, Steps
from shardlab.why.pipelined import EVEN, PipelinedStep, is_pipelined, levelled, medians, others, pipelined_steps
from shardlab.why.recorded_step import RecordedStep

BUBBLE, UNBALANCED = "pipeline bubble", "unbalanced stages"


def found(record: Recorded) -> Iterator[Found]:
    """Those of the schedule; none where there is no pipeline."""
    if not is_pipelined(record.spans):
        return
    every = pipelined_steps(record.collectives, record.spans, record.axes)
    steps = [step for step in every if step.ranks == every[0].ranks]  # of the first pipeline, as long as the others
    if len(steps) < len(record.steps):
        return
    base = _again(record, steps, lambda step: step.done.schedule, lambda step: step.done.work.__getitem__)
    yield from _bubble(record, steps, base)
    yield from _unbalanced(record, steps, base)


def _bubble(record: Recorded, steps: list[PipelinedStep], base: Steps) -> Iterator[Found]:
    measured, foretold = medians(steps)
    schedule, held = steps[0].done.schedule, range(len(steps[0].ranks))
    most = max(schedule.in_flight(rank) for rank in held)
    said = (
        f"ranks wait for other stages for {100 * measured:.0f} % of the schedule's time, by its list "
        f"{100 * foretold:.0f} %; a rank holds at most {most} micro-batches"
    )

    def with_list(other: Schedule) -> Steps:
        return _again(record, steps, lambda _: other, lambda step: step.shared_out(other))

    tried = [
        Found(BUBBLE, with_list(other), said, change, _without_waits(base), settings, base)
        for change, settings, other in others(steps[0])
    ]
    yield from sorted(tried, key=lambda one: -float(np.median(record.gains(one.changed, base))))[:1]


def _unbalanced(record: Recorded, steps: list[PipelinedStep], base: Steps) -> Iterator[Found]:
    spent = [median(sum(step.spent(rank).values()) for step in steps) for rank in range(len(steps[0].ranks))]
    longest = int(np.argmax(spent))
    others_us = float(np.mean([us for rank, us in enumerate(spent) if rank != longest]))
    if spent[longest] < (1 + EVEN) * others_us:
        return
    said = (
        f"the stages of rank {steps[0].ranks[longest]} take {spent[longest] / 1e3:.3g} ms of a step, those of another "
        f"rank {others_us / 1e3:.3g} ms"
    )
    changed = _again(record, steps, lambda step: step.done.schedule, levelled)
    yield Found(UNBALANCED, changed, said, "stages of equal work, cut elsewhere (--begins),", base=base)


def _again(
    record: Recorded, steps: list[PipelinedStep], list_of: Callable[[PipelinedStep], Schedule],
    us_of: Callable[[PipelinedStep], Callable[[Action], float]],
) -> Steps:  # fmt: skip
    """The steps by other lists or with other work; what is around the schedule stays as it was."""
    made = []
    for step, recorded_us in zip(steps, record.base.tolist(), strict=True):
        around = max(0.0, recorded_us - _programs(record, step, step.done.schedule, step.done.work.__getitem__, 0.0).us)
        made.append(_programs(record, step, list_of(step), us_of(step), around))
    return made


def _programs(
    record: Recorded, step: PipelinedStep, schedule: Schedule, us_of: Callable[[Action], float], around_us: float
) -> RecordedStep:  # fmt: skip
    work = {action: us_of(action) for actions in schedule.ranks for action in actions}
    usual = median(step.transfer_us.values()) if step.transfer_us else 0.0
    items = programs(schedule, work, lambda action: step.transfer_us.get(action, usual))
    ended = {rank: (Work(step.late_us[rank]), *own, Work(around_us)) for rank, own in items.items()}
    return RecordedStep(ended, 0.0, dict.fromkeys(ended, 0.0), {}, record.spans)


def _without_waits(steps: Steps) -> Steps:
    return [step.without_messages(step.messages) for step in steps]
