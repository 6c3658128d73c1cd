"""The tensors one rank steps, under the names of the user's module.

An optimizer takes them as they are, ``torch.optim.AdamW(tensors, lr=1e-3)``; parameter groups are made by name:

    torch.optim.AdamW([
        {"params": tensors.where(lambda name: name.endswith("bias")), "weight_decay": 0.0},
        {"params": tensors.where(lambda name: not name.endswith("bias"))},
    ], lr=1e-3)

Where a strategy shards, a tensor is the piece this rank holds (one-dimensional, or the whole parameter in its shape);
it is empty for a parameter this rank holds nothing of. So every rank makes the same groups, with the same indices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from torch import Tensor


class StepTensors(Sequence[Tensor]):
    """A sequence of tensors that remembers their names; the order is the module's."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    @property
    def names(self) -> list[str]:
        """Parameter names, in the module's order."""
        return list(self._tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor, a form that torch's optimizers take as well."""
        return iter(self._tensors.items())

    def by_name(self, name: str) -> Tensor:
        """The tensor of one parameter."""
        return self._tensors[name]

    def where(self, wanted: Callable[[str], bool]) -> "StepTensors":
        """The tensors whose name ``wanted`` accepts."""
        return StepTensors({name: tensor for name, tensor in self._tensors.items() if wanted(name)})

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "StepTensors": ...
    def __getitem__(self, index: int | slice) -> "Tensor | StepTensors":
        if isinstance(index, slice):
            return StepTensors(dict(list(self._tensors.items())[index]))
        return list(self._tensors.values())[index]

    def __len__(self) -> int:
        return len(self._tensors)
