"""What was measured of a weighed step, as facts in words: by them a mistake is told, however it was written.

``mistakes.toml`` says for each whole strategy what was thought where a fact holds; the first of these tables counts.
Where numbers are wrong, ``NUMBERS`` are asked alone: what is slow or large does not explain them.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from shardlab.course.exercises.exercise import Case, Done, Message
from shardlab.vocabulary import Collective, Role

REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
GATHERS = (Collective.ALL_GATHER,)


class Step:
    """A weighed step of one rank, beside what is wanted."""

    def __init__(self, done: Done, case: Case) -> None:
        assert case.traffic is not None
        self.done, self.case, self.num_ranks, self.wanted = done, case, len(case.inputs), case.traffic.wanted[0]
        limits: tuple[Any, ...] = (*case.inputs[0], inf)
        self.most_at_rest, self.largest = limits[:2]
        self.all_us = sum(end - start for what, start, end in done.spans if what == "compute")

    def sent(self, verbs: Sequence[str], *phases: str) -> list[Message]:
        """Messages of these verbs, in these phases or in all."""
        return [one for one in self.done.messages if one.op in verbs and (not phases or one.phase in phases)]

    def times(self, verbs: Sequence[str], found: Sequence[Message]) -> float:
        """The bytes of messages as a multiple of those that are wanted of these verbs; 0 where none are."""
        wanted = sum(one.num_bytes for one in self.wanted if one.op in verbs)
        return sum(one.num_bytes for one in found) / wanted if wanted else 0

    def at_once(self) -> float:
        """The part of the gathers that were sent in forward when the first one was."""
        found = self.sent(GATHERS, "forward")
        return self.times(GATHERS, [one for one in found if one.computed_us[0] == found[0].computed_us[0]])

    def late(self) -> float:
        """The part of the reductions that were sent when all gradients had come."""
        return self.times(REDUCTIONS, [one for one in self.sent(REDUCTIONS) if one.computed_us[0] >= self.all_us])

    def waits(self, verbs: Sequence[str], *phases: str) -> bool:
        """Whether nothing was computed between any of the messages and the wait for it, while there was something."""
        found = [one.computed_us for one in self.sent(verbs, *phases) if one.computed_us[0] < self.all_us]
        return bool(found) and all(sent == waited for sent, waited in found)

    def has_too_much(self, role: Role) -> bool:
        """Whether more is held at rest than is enough; of gathered parameters, at once."""
        return role in self.most_at_rest and self.done.at_rest.get(role, 0) > self.most_at_rest[role]


Facts = Mapping[str, Callable[[Step], bool]]
NUMBERS: Facts = {
    "nothing is reduced": lambda step: not step.sent(REDUCTIONS),
    "nothing is summed in forward": lambda step: not step.sent(REDUCTIONS, "forward"),
    "nothing is summed in backward": lambda step: not step.sent(REDUCTIONS, "backward"),
    "means are sums": lambda step: step.done.factor == step.num_ranks,
    "means are divided twice": lambda step: step.done.factor == 1 / step.num_ranks,
    "means are this rank's own": lambda step: step.done.keeps_own,
    "gathered before the step": lambda step: bool(step.sent(GATHERS)) and not step.sent(GATHERS, "step"),
    "nothing is gathered": lambda step: not step.sent(GATHERS),
}
COSTS: Facts = {
    "too much optimizer state": lambda step: step.has_too_much(Role.OPTIMIZER_STATE),
    "too many parameters": lambda step: step.has_too_much(Role.PARAMETER),
    "too many gradients": lambda step: step.has_too_much(Role.GRADIENT),
    "too much besides": lambda step: step.has_too_much(Role.OTHER),
    "a message is too large": lambda step: any(one.num_bytes > step.largest for one in step.done.messages),
    "all-reduces as many bytes": lambda step: step.times(REDUCTIONS[1:], step.sent(REDUCTIONS[:1])) >= 1,
    "a strange verb": lambda step: not {one.op for one in step.done.messages} <= {one.op for one in step.wanted},
    "reduces more": lambda step: step.times(REDUCTIONS, step.sent(REDUCTIONS)) > 1,
    "gathers less": lambda step: step.times(GATHERS, step.sent(GATHERS)) < 1,
    "gathers more": lambda step: step.times(GATHERS, step.sent(GATHERS)) > 1,
    "gathers all at once": lambda step: step.at_once() >= 1 / 2,
    "waits for each gather": lambda step: step.waits(GATHERS),
    "waits for each gather in backward": lambda step: step.waits(GATHERS, "backward"),
    "waits for each gather in forward": lambda step: step.waits(GATHERS, "forward"),
    "waits for each reduction": lambda step: step.waits(REDUCTIONS),
    "every reduction is late": lambda step: step.late() >= 1,
    "most reductions are late": lambda step: step.late() > 1 / 2,
    "too much is gathered": lambda step: step.has_too_much(Role.GATHERED_PARAMETER),
    "the peak is too high": lambda step: step.done.peak_bytes > step.case.most_peak_bytes,
}  # fmt: skip


def facts_of(done: Sequence[Done], case: Case, facts: Facts) -> list[str]:
    """Those that hold on some rank, in the order of their table.

    Args:
        done: what each rank came to in a case that weighs.
        case: the case.
        facts: those that are looked for.
    """
    steps = [Step(of_rank, case) for of_rank in done]
    return [words for words, holds in facts.items() if any(map(holds, steps))]
