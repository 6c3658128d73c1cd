"""Schedules of a pipeline: for each rank a list of actions, and nothing else; pure arithmetic.

A model is cut into stages, a batch into micro-batches. An action is one stage's forward or backward of one micro-batch,
and its text is torch's: ``2F0`` is the forward of stage 2 for micro-batch 0. Backward may be cut in two: ``I`` brings
the gradient of the stage's input, for which the stage before waits, ``W`` those of its weights, for which nobody does.

============  ===================================================  ===========================  ====================
schedule      order                                                idle, of each rank           micro-batches held
============  ===================================================  ===========================  ====================
gpipe         all forwards, then all backwards                     (p-1)(F+B)                   m
1f1b          p-r forwards, then one backward, one forward         (p-1)(F+B)                   min(m, p-r)
interleaved   the same with v stages a rank; p divides m           (p-1)(F+B)/v                 see ``interleaved``
zb-h1         1f1b; each W comes r micro-batches after its I       (p-1)(F+I-W), if m >= p      min(m, p)
============  ===================================================  ===========================  ====================

p ranks, m micro-batches, r the rank; F, B = I + W how long one takes on a rank, with all of its stages. So 1F1B is not
faster than GPipe: it keeps fewer activations.
Sources: Huang et al., arXiv 1811.06965, section 2.3 (GPipe); Narayanan et al., arXiv 2104.04473, section 2.2 (1F1B and
interleaved); Qi et al., arXiv 2401.10241, section 2 (ZB-H1).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

_TEXT = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class Kind(StrEnum):
    """What an action does, in torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_OF_INPUT = "I"
    BACKWARD_OF_WEIGHTS = "W"


F, B, I, W = Kind  # noqa: E741
LAST = (B, W)
"""With which the backward of a micro-batch ends, so that its input is held no more."""


class Action(NamedTuple):
    """One stage's work for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def tag(self) -> str:
        """Of the message with what it brings."""
        what = "activations" if self.kind is Kind.FORWARD else "gradients"
        return f"{what} of stage {self.stage}, micro-batch {self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action of a text such as ``2F0``.

        Raises:
            ValueError: it is none.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"action: {text!r} is none; write stage, F, B, I or W, and micro-batch, as in '2F0'")
        return cls(Kind(found[2]), int(found[1]), int(found[3]))


Actions = tuple[Action, ...]


def gpipe(num_ranks: int, num_micro_batches: int, rank: int) -> Actions:  # noqa: ARG001, all plans take the same
    """All forwards, then all backwards."""
    return (*_each(F, rank, num_micro_batches), *_each(B, rank, num_micro_batches))


def one_forward_one_backward(num_ranks: int, num_micro_batches: int, rank: int) -> Actions:
    """As many forwards as there are stages from here on, then backwards and forwards in turns."""
    forwards, backwards = (_each(kind, rank, num_micro_batches) for kind in (F, B))
    return _in_turns(forwards, backwards, min(num_ranks - rank, num_micro_batches))


def interleaved(num_ranks: int, num_micro_batches: int, rank: int, stages_per_rank: int = 2) -> Actions:
    """1F1B over ``stages_per_rank`` stages a rank: stage s is on rank s mod p, and p micro-batches go together.

    With v stages a rank, min(2(p-1-r) + (v-1)p + 1, vm) of the rank's inputs are held at once.

    Raises:
        ValueError: ``num_ranks`` does not divide ``num_micro_batches``.
    """
    if num_micro_batches % num_ranks:
        raise ValueError(f"micro_batches: {num_micro_batches}; interleaved takes a multiple of {num_ranks}; use 1f1b")
    rounds = range(0, num_micro_batches, num_ranks)
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    forwards = _by_round(F, rounds, stages, num_ranks)
    backwards = _by_round(B, rounds, stages[::-1], num_ranks)
    ahead = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * num_ranks + 1
    return _in_turns(forwards, backwards, min(ahead, len(forwards)))


def zb_h1(num_ranks: int, num_micro_batches: int, rank: int) -> Actions:
    """1F1B with backward cut in two: the W of a micro-batch follows the I of the one ``rank`` later.

    So the last W fill the time in which 1F1B waits at the end.
    """
    actions, late = list[Action](), list(_each(W, rank, num_micro_batches))
    for action in one_forward_one_backward(num_ranks, num_micro_batches, rank):
        actions.append(action._replace(kind=I) if action.kind is B else action)
        if action.kind is B and action.micro_batch >= rank:
            actions.append(late.pop(0))
    return (*actions, *late)


def _each(kind: Kind, stage: int, num_micro_batches: int) -> Actions:
    return tuple(Action(kind, stage, number) for number in range(num_micro_batches))


def _by_round(kind: Kind, rounds: range, stages: Sequence[int], num_ranks: int) -> Actions:
    return tuple(Action(kind, stage, first + at) for first, stage, at in product(rounds, stages, range(num_ranks)))


def _in_turns(forwards: Actions, backwards: Actions, ahead: int) -> Actions:
    """``ahead`` forwards, then a backward and, as long as there are any, a forward."""
    actions = list(forwards[:ahead])
    for place, backward in enumerate(backwards):
        actions += [backward, *forwards[ahead + place : ahead + place + 1]]
    return tuple(actions)


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order.

    Attributes:
        ranks: the actions of each rank of the pipeline.

    Raises:
        ValueError: an action is missing or there twice, a stage is on two ranks, a rank has none, or a backward stands
            before its forward.
    """

    ranks: tuple[Actions, ...]

    def __post_init__(self) -> None:
        if (stages := list(self.rank_of)) != list(range(max(1, len(stages)))) or not all(self.ranks):
            raise ValueError(f"schedule: stages are {stages or 'none'}; number them 0, 1, ... and give each rank one")
        for rank, actions in enumerate(self.ranks):
            _check_rank(rank, actions, self.num_micro_batches)

    @classmethod
    def from_csv(cls, text: str) -> "Schedule":
        """The schedule of a table of actions, a line for each rank, as torch writes and reads it.

        Raises:
            ValueError: a cell is no action, or the actions are no schedule.
        """
        lines = [line.split(",") for line in text.splitlines() if line.strip()]
        return cls(tuple(tuple(Action.parse(cell) for cell in line if cell.strip()) for line in lines))

    def to_csv(self) -> str:
        """A line for each rank."""
        return "".join(f"{','.join(map(str, actions))}\n" for actions in self.ranks)

    @cached_property  # asked for at each action of a step
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for stage in {action.stage for action in actions}:
                if found.setdefault(stage, rank) != rank:
                    raise ValueError(f"schedule: stage {stage} is on ranks {found[stage]} and {rank}; give it one")
        return dict(sorted(found.items()))

    @cached_property
    def num_stages(self) -> int:
        """On all ranks together."""
        return len(self.rank_of)

    @cached_property
    def num_micro_batches(self) -> int:
        """Of a step."""
        return 1 + max((action.micro_batch for actions in self.ranks for action in actions), default=-1)

    def in_flight(self, rank: int) -> int:
        """The most inputs of stages that a rank holds at once: from forward until the last of backward."""
        return max(accumulate((action.kind is F) - (action.kind in LAST) for action in self.ranks[rank]), default=0)

    def held(self, rank: int) -> float:
        """The most micro-batches that a rank holds at once; in one of its v stages, all equal, it is 1/v of one."""
        return self.in_flight(rank) * len(self.ranks) / self.num_stages

    def needs(self, action: Action) -> Action | None:
        """The action of another stage whose message this one waits for; None if it needs none."""
        kind, stage, number = action
        if kind is F and stage:
            return Action(F, stage - 1, number)
        if kind in (B, I) and stage < self.num_stages - 1:
            later = Action(B, stage + 1, number)
            return later if later in self.ranks[self.rank_of[stage + 1]] else later._replace(kind=I)
        return None

    def sent(self) -> dict[Action, tuple[int, int]]:
        """The actions whose result another rank needs: from which rank, to which; a rank's own in its order."""
        every = [(rank, action) for rank, actions in enumerate(self.ranks) for action in actions]
        needed = {need: rank for rank, action in every if (need := self.needs(action)) is not None}
        return {action: (rank, to) for rank, action in every if (to := needed.get(action, rank)) != rank}

    def confirmed_by(self, rank: int) -> dict[Action, Actions]:
        """For each message that a rank receives, which of its own the sender had taken before, since it sent the last.

        They have arrived, so their memory may go.
        """
        sent, found = self.sent(), dict[Action, Actions]()
        for actions in self.ranks:
            taken: Actions = ()
            for action in actions:
                if (need := self.needs(action)) is not None and need in sent and sent[need][0] == rank:
                    taken = (*taken, need)
                if action in sent and sent[action][1] == rank:
                    found[action], taken = taken, ()
        return found


def _check_rank(rank: int, actions: Actions, num_micro_batches: int) -> None:
    places = {action: place for place, action in enumerate(actions)}
    if twice := [action for place, action in enumerate(actions) if places[action] != place]:
        raise ValueError(f"schedule: {twice[0]} stands twice on rank {rank}")
    for stage in sorted({action.stage for action in actions}):
        for number in range(num_micro_batches):
            forward, whole, first, second = (Action(kind, stage, number) for kind in Kind)
            order = [forward, first, second] if first in places or second in places else [forward, whole]
            if missing := [action for action in order if action not in places]:
                raise ValueError(f"schedule: {missing[0]} is missing on rank {rank}")
            if len(order) == 3 and whole in places:
                raise ValueError(f"schedule: {whole} stands beside {first} and {second}, which are its two halves")
            for before, after in pairwise(order):
                if places[before] > places[after]:
                    raise ValueError(f"schedule: {after} stands before {before} on rank {rank}")


Plan = Callable[[int, int, int], Actions]
PLANS: Mapping[str, Callable[..., Actions]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zb-h1": zb_h1,
}  # fmt: skip


def make_schedule(plan: str | Plan, num_ranks: int, num_micro_batches: int, **options: int) -> Schedule:
    """The schedule of a name, or of a function (ranks, micro-batches, rank) of the reader's own.

    Args:
        plan: 'gpipe', '1f1b', 'interleaved' (option ``stages_per_rank``), 'zb-h1', or a function.
        num_ranks: of the pipeline.
        num_micro_batches: of a step.
        options: of the function.

    Raises:
        ValueError: an unknown name, a number below 1, or what ``Schedule`` refuses.
    """
    for field, number in (("ranks", num_ranks), ("micro_batches", num_micro_batches), *options.items()):
        if number < 1:
            raise ValueError(f"{field}: {number} is too small; give at least 1")
    if isinstance(plan, str) and plan not in PLANS:
        raise ValueError(f"schedule: {plan!r} is not one of {', '.join(PLANS)}")
    make = PLANS[plan] if isinstance(plan, str) else plan
    return Schedule(tuple(tuple(make(num_ranks, num_micro_batches, rank, **options)) for rank in range(num_ranks)))
