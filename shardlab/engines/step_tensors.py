"""The tensors this rank steps, under the names of the user's module.

An optimizer takes them directly, ``torch.optim.AdamW(tensors, lr=1e-3)``; parameter groups are chosen by name:

    torch.optim.AdamW([
        {"params": tensors.where(lambda name: name.endswith("bias")), "weight_decay": 0.0},
        {"params": tensors.where(lambda name: not name.endswith("bias"))},
    ], lr=1e-3)

Where a strategy shards, each tensor is the piece this rank holds (one-dimensional, or a whole parameter in its shape),
and is empty if this rank holds nothing of the parameter. So every rank makes the same groups, with the same indices.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import overload

from torch import Tensor
from typing_extensions import override


class StepTensors(Sequence[Tensor]):
    """A sequence of tensors that remembers their names; the order is the module's.

    Args:
        tensors: by name.
        are_parts: whether some tensors have their other parts on other ranks, so that the norm of these is not the
            model's.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, are_parts: bool = False) -> None:
        self._tensors, self.are_parts = dict(tensors), are_parts

    @override
    def __iter__(self) -> Iterator[Tensor]:
        """The tensors.

        Raises:
            RuntimeError: the caller is torch's ``clip_grad_norm_``, which would scale each rank's parts differently.
        """
        if self.are_parts and _asks_for_a_norm(sys._getframe(1)):
            raise RuntimeError(
                "engine.step_tensors(): these are this rank's parts, and torch.nn.utils.clip_grad_norm_ would compute "
                "a different norm on each rank; write engine.clip_grad_norm_(max_norm)"
            )
        return iter(self._tensors.values())

    @property
    def names(self) -> list[str]:
        """Parameter names, in the module's order."""
        return list(self._tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor, which torch's optimizers take as well."""
        return iter(self._tensors.items())

    def by_name(self, name: str) -> Tensor:
        """The tensor of one parameter."""
        return self._tensors[name]

    def where(self, wanted: Callable[[str], bool]) -> "StepTensors":
        """The tensors whose name ``wanted`` accepts."""
        chosen = {name: tensor for name, tensor in self._tensors.items() if wanted(name)}
        return StepTensors(chosen, are_parts=self.are_parts)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "StepTensors": ...
    @override
    def __getitem__(self, index: int | slice) -> "Tensor | StepTensors":
        if isinstance(index, slice):
            return StepTensors(dict(list(self._tensors.items())[index]), are_parts=self.are_parts)
        return list(self._tensors.values())[index]

    @override
    def __len__(self) -> int:
        return len(self._tensors)


def _asks_for_a_norm(caller: FrameType) -> bool:
    """Whether torch's clipping is the caller. Looking at its frame is a last resort: torch has no hook on clipping."""
    return caller.f_code.co_name == "clip_grad_norm_" and caller.f_globals.get("__name__") == "torch.nn.utils.clip_grad"
