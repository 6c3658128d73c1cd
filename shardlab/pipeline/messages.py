"""What travels between stages in a step, to the byte, from the schedule, the cut and the shapes.

For p ranks with v stages each and m micro-batches (pv - 1) m messages forward, each a micro-batch's output of a stage,
and as many backward, its gradient; less those between stages of one rank. Of a parameter that stages of several ranks
use, its owner sends the value to each of the others before the first action, and each of these returns the sum of its
gradients behind its last: two messages a step of the parameter's size, as many bytes for each of two ranks as in an
all-reduce of the gradient, and in the second one more number, whether it was used. Only the owner has it in its engine:
its state is there once, and so is its share of the norm.

What outputs are like is sent too, 80 bytes before the first of its kind, unless ``Pipeline.expect`` has been told.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from shardlab.pipeline.stages import Cut, params_of
from shardlab.schedules.actions import Kind, Schedule

TIED = "precision: {!r} is tied over ranks; take precision='full', or a model that does not tie it"


class Like(NamedTuple):
    """Shape and dtype of a stage's output."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Loan(NamedTuple):
    """A parameter that one rank trains under its name, and another one uses too, under others.

    Attributes:
        name: the model's own.
        param: itself.
        owner: the rank that trains it.
        to: the rank that borrows it.
        used_as: its names there.
    """

    name: str
    param: nn.Parameter
    owner: int
    to: int
    used_as: tuple[str, ...]

    @property
    def tag(self) -> str:
        """Of the message with its value; ``gradient of`` stands before it in that of its gradient."""
        return f"tied {self.name}"


def loans_of(model: nn.Module, stages: Cut, rank_of: Mapping[int, int]) -> list[Loan]:
    """One for each rank that borrows a parameter; its owner has the part that uses it under the model's name of it.

    Args:
        model: with parts.
        stages: the names of the parts of each.
        rank_of: the rank of each.
    """
    used: dict[nn.Parameter, dict[int, list[str]]] = {}
    for stage, names in enumerate(stages):
        for name, param in params_of(model, names):
            used.setdefault(param, {}).setdefault(rank_of[stage], []).append(name)
    loans = []
    for name, param in model.named_parameters():
        by_rank = used.get(param, {})
        for owner in [rank for rank, names in by_rank.items() if name in names][:1]:
            loans += [Loan(name, param, owner, to, tuple(names)) for to, names in by_rank.items() if to != owner]
    return loans


class Sent(NamedTuple):
    """A message between two ranks of the axis ``pipe``."""

    rank: int
    to: int
    tag: str
    num_bytes: int


def messages_of(schedule: Schedule, outputs: Sequence[Like], loans: Sequence[Loan] = ()) -> list[Sent]:
    """The messages of a step, those of a rank to another in the order in which it sends them.

    Args:
        schedule: what each rank does.
        outputs: of each stage but the last, for one micro-batch.
        loans: see ``loans_of``.
    """
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in outputs]
    sent = schedule.sent().items()
    between = [Sent(*way, one.tag, sizes[one.stage - (one.kind is not Kind.FORWARD)]) for one, way in sent]
    lent = [Sent(one.owner, one.to, one.tag, one.param.nbytes) for one in loans]
    # With one more number: whether the borrower has used it.
    back = [Sent(one.to, one.owner, f"gradient of {one.tag}", one.param.nbytes + one.param.itemsize) for one in loans]
    return [*lent, *between, *back]
