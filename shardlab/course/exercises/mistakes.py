"""What was thought: a failure that a known mistake comes to as well, number by number, is said in words.

``mistakes.toml`` has for each exercise what one has thought who fails in a way, which is told by one of three: a
signature, which is of behaviour alone (the case, what differs first and, where ranks came to results, all of these); a
fact that was measured of a weighed step, however the mistake was written; words of the reason. Of several facts the
first of their table counts; where numbers are wrong, ``NUMBERS`` are asked alone: what is slow or large does not
explain them. Of a failure that is not known at least a ratio is said, where all numbers have the same.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from itertools import chain
from math import inf, isclose
from pathlib import Path
from typing import Any

from torch import Tensor

from shardlab.course.exercises.exercise import Case, Done, Message
from shardlab.course.exercises.values import difference, numbers_in, plain
from shardlab.vocabulary import Collective, Role

PLACE = re.compile(r" \(at [^)]*\)")
MISMATCH = re.compile(r"MismatchError.*")  # it begins with the rank that saw it first
RAISED = re.compile(r"rank \d+ raised ")
WAITS = re.compile(r"rank \d+ in \w+")
CLOSE = 1e-9


@cache
def known() -> dict[str, dict[str, tuple[str, str]]]:
    """By what it is told and a sentence, of each mistake by exercise and by a name for it."""
    return tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text())


def signature(reason: str, case: Case, done: Sequence[Done]) -> str:
    """Of a failure: by the results of all ranks where one is wrong, else by what the reason says."""
    text = f"{case.words} {[_rounded(of_rank.result) for of_rank in done]}"
    if not any(difference(plain(wanted), one.result) for wanted, one in zip(case.wanted, done, strict=False)):
        text = _without_chance(reason)
    return blake2b(text.encode(), digest_size=4).hexdigest()


def _without_chance(reason: str) -> str:
    """What answers have in common that fail alike: no lines and limits, and not which rank was the first to raise."""
    case, waited, ranks = reason.partition("ranks waited in ")
    if waited:
        return f"{case}{WAITS.findall(ranks)}"
    return MISMATCH.sub("MismatchError", RAISED.sub("", PLACE.sub("", reason)))


def mistake_in(exercise: str, reason: str, case: Case, done: Sequence[Done], facts: Collection[str] = ()) -> str:
    """A sentence on what was thought, or on the ratio of found and wanted; empty where nothing is known.

    Args:
        exercise: its name.
        reason: of the failure, one line.
        case: in which it failed.
        done: what each rank came to.
        facts: what was measured of a step (``facts_of``); the first that is known decides.
    """
    found, kind = signature(reason, case, done), exercise.partition(".")[0]
    own = dict((*known().get(kind, {}).values(), *known().get(exercise, {}).values()))
    for told_by in (found, *(words for words in own if words in reason), *facts):
        if told_by in own:
            return f"You get this when {own[told_by]}"
    # Exercises of a kind share cases and results: what is known of one may be what was thought in another.
    others = (answers.values() for name, answers in known().items() if name.partition(".")[0] == kind)
    for told_by, sentence in chain.from_iterable(others):
        if told_by == found:
            return f"You get this when {sentence}"
    ratio = _ratio([plain(wanted) for wanted in case.wanted], [of_rank.result for of_rank in done])
    return _in_words(ratio, len(done)) if ratio else ""


def _rounded(value: object) -> object:
    """With numbers as text of five digits, whatever type they have, so that another order of summation is equal."""
    value = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return f"{round(value, 9) + 0.0:.5g}" if isinstance(value, int | float) else value


def _ratio(wanted: object, found: object) -> float:
    """By which all numbers differ of the first tensor, or float, that is wrong; 0 if there is none."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping) and set(wanted) == set(found):
        return _ratio(list(wanted.values()), [found[key] for key in wanted])
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        wrong = (pair for pair in zip(wanted, found, strict=True) if difference(*pair))
        return _ratio(*next(wrong, (None, None)))
    right, numbers = numbers_in(wanted), numbers_in(found)
    if not isinstance(wanted, Tensor | float) or len(right) != len(numbers) or not any(right):
        return 0.0  # what counts something, as layers in a bucket, has no ratio that says anything
    ratio = next(there / here for here, there in zip(right, numbers, strict=True) if here)
    is_same = all(isclose(there, ratio * here, rel_tol=CLOSE) for here, there in zip(right, numbers, strict=True))
    return ratio if is_same and not isclose(ratio, 1, rel_tol=CLOSE) else 0.0  # a shape, for 1


def _in_words(ratio: float, num_ranks: int) -> str:
    ways = (
        (num_ranks, f"{num_ranks} times what is wanted, and there are {num_ranks} ranks: a sum that nobody has "
         "divided, or something that every rank has counted."),
        (1 / num_ranks, f"1/{num_ranks} of what is wanted, and there are {num_ranks} ranks: divided once too often, or "
         "the term of one rank in the place of a sum."),
        (2, "twice what is wanted: something is counted two times."),
        (1 / 2, "half of what is wanted: it is divided once too often, or a half of the terms is missing."),
        (-1, "what is wanted with the other sign."),
    )  # fmt: skip
    return next((f"Found is {words}" for of_words, words in ways if isclose(ratio, of_words, rel_tol=CLOSE)), "")


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
    steps = [Step(of_rank, case) for of_rank in done if of_rank.held]  # else nothing was weighed
    return [words for words, holds in facts.items() if any(map(holds, steps))]
