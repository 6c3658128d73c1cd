"""What a process notes of the steps of a script: numbers and lines, in files that the comparison reads.

A rank notes what it has done; the single process, which runs the same script in a group of one on the rows of one
rank, notes the same. A piece of a parameter or of its gradient is noted as this process holds it, with its place in
the whole, so that nothing is sent: wholes are put together where all files are.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

IN_MEMORY = 1 << 16  # bytes; each file is a mapping, of which a process may have so many
Place = tuple[tuple[int, int], ...]
"""For each dim, offset and size; of pieces of the flattened tensor one of both, with ``is_flat``."""


class UnlikeError(Exception):
    """Processes did what cannot be matched; the text says what."""


class Part(NamedTuple):
    """A piece of a tensor.

    Attributes:
        name: of the parameter.
        shape: of the whole.
        place: of the piece.
        value: its elements.
        is_flat: whether the piece is one of the flattened tensor.
        adds_up: whether the whole is the sum of such pieces.
    """

    name: str
    shape: tuple[int, ...]
    place: Place
    value: Tensor
    is_flat: bool = False
    adds_up: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """The same piece of a whole."""
        one = whole.reshape(-1) if self.is_flat else whole
        return one[tuple(slice(start, start + size) for start, size in self.place)].reshape(self.value.shape)

    @property
    def key(self) -> tuple[str, Place]:
        """Which piece it is."""
        return self.name, self.place

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return not self.adds_up and self.value.numel() == torch.Size(self.shape).numel()


Known = dict[tuple[str, Place], Tensor]  # pieces by their keys


def kept(tensor: Tensor) -> Tensor:
    """A copy; a large one lies in a file without a name, so that what is noted takes no memory that is scarce."""
    if tensor.nbytes < IN_MEMORY:
        return tensor.detach().cpu().clone()
    with tempfile.NamedTemporaryFile() as file:
        made = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return made.reshape(tensor.shape).copy_(tensor.detach())


def same_tensors(some: Mapping[Any, Tensor], others: Mapping[Any, Tensor]) -> bool:
    """Whether they have the same keys, and equal tensors."""
    return some.keys() == others.keys() and all(torch.equal(one, others[key]) for key, one in some.items())


def factor(before: Sequence[Part], after: Sequence[Part]) -> float:
    """By what pieces have been multiplied, by least squares; exactly 1 where that is next to nothing."""
    known = {part.key: part.value for part in before}
    both = [(known[part.key], part.value) for part in after if part.key in known]
    size = sum(float(one.double().square().sum()) for one, _ in both)
    if not size or all(one.equal(other) for one, other in both):
        return 1.0
    found = sum(float((one.double() * other).sum()) for one, other in both) / size
    return 1.0 if isclose(found, 1.0, rel_tol=1e-6) else found


@dataclass
class Call:
    """A forward of a module that trains.

    Attributes:
        given: the tensors it was given; None for those that another module has computed.
        operands: those that its output met on the way to the loss, by function, line and number.
    """

    given: list[Tensor | None] = field(default_factory=list)
    operands: dict[tuple[str, str, int], list[Tensor]] = field(default_factory=dict)


class Counted(NamedTuple):
    """A loss function of torch that reduces.

    Attributes:
        number: of rows or tokens that count.
        summed: what they add up to.
    """

    number: int
    summed: float


class Cleared(NamedTuple):
    """A gradient that was cleared before an optimizer stepped it.

    Attributes:
        name: of the parameter.
        norm: of what was lost, on this process.
        backward: the last one of which it has a part, in its step.
        line: that cleared it; empty if a way was used that is not watched.
        is_of_another: the backward was followed by the step of an optimizer that does not have the parameter.
    """

    name: str
    norm: float
    backward: int
    line: str
    is_of_another: bool


class Message(NamedTuple):
    """A collective: what, of which part of torch ('' for the script), over which ranks, in which backward of the step.

    Attributes:
        names: of the parameters whose gradients or weights are in its memory, where the script itself sends them.
        numel: elements of the whole buffer.
    """

    op: str
    caller: str
    line: str
    ranks: tuple[int, ...]
    dtype: str
    names: tuple[str, ...]
    backward: int
    numel: int = 1


@dataclass
class Backward:
    """One call of backward.

    Attributes:
        loss: that was differentiated.
        line: of the script.
        counted: loss functions since the last one.
        brought: what it has added to the gradients; of a single process, where a step has several.
        grew_from: norms of the gradients that were there before, where there were any.
    """

    loss: float
    line: str
    counted: list[Counted]
    brought: list[Part] = field(default_factory=list)
    grew_from: dict[str, float] = field(default_factory=dict)


@dataclass
class Step:
    """A step of one optimizer, and what came before it since the last step of any.

    Attributes:
        optimizer: its number in the order of first steps; -1 if the step did not come.
        weights: of each module, when it was first called.
        buffers: likewise, by name.
        calls: of each module, by its number.
        backwards: in order; where another optimizer has just stepped a part of what they brought, those of its step.
        gradients: before they were clipped or stepped.
        stepped: just before the step.
        norm: by which they were clipped; None if it is not known here.
        max_norm: that clipping allowed; None without.
        clipped: names of the parameters of which that is the norm.
        scale: by what a single process multiplies what backwards have brought, before torch's clipping or the step.
        options: of the optimizer's groups.
        after: weights that this optimizer has stepped, when a module was called next.
        line: of the step.
        names: of what it steps; names of what no module has are empty.
        cleared: before it.
        is_moved: whether the script has moved weights by gradients that it then cleared, as SAM does.
        unreduced: norms of gradients that FSDP2 has added up and not reduced, by name.
        messages: before it.
        dtypes: in which modules computed.
    """

    optimizer: int = -1
    weights: list[Part] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    backwards: list[Backward] = field(default_factory=list)
    gradients: list[Part] = field(default_factory=list)
    stepped: list[Part] = field(default_factory=list)
    norm: float | None = None
    max_norm: float | None = None
    clipped: list[str] = field(default_factory=list)
    scale: float = 1.0
    options: list[dict[str, Any]] = field(default_factory=list)
    after: list[Part] = field(default_factory=list)
    line: str = ""
    names: list[str] = field(default_factory=list)
    cleared: list[Cleared] = field(default_factory=list)
    is_moved: bool = False
    unreduced: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)


@dataclass
class Notes:
    """All of one process.

    Attributes:
        steps: finished ones.
        batches: what each loader has given, and whether it ended.
        lengths: of the loaders.
        shapes: of the parameters that train and of those that do not, by name.
        trainable: names of those that train.
        tied: those of them that a module has under several names.
        error: by which the script ended; empty if it did not.
        left_by_others: whether that is only that other ranks had ended, or never came.
        refused: why it cannot be judged; empty if it can.
        has_enough: whether it was ended before its own end, after the steps that were asked for.
        has_ended: whether this is all.
    """

    steps: list[Step] = field(default_factory=list)
    batches: list[list[Any]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    error: str = ""
    left_by_others: bool = False
    refused: str = ""
    has_enough: bool = False
    has_ended: bool = False
