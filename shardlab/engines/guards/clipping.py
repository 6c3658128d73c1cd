"""Torch's clipping, which would compute another norm on each rank: what an engine steps refuses to be given to it.

Only the engine's own collection, or a group of its optimizer: a list that the user has made of the tensors is a list
like any other.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

import torch
from torch import Tensor

from shardlab.engines.step_tensors import StepTensors


class GuardedTensors(StepTensors):
    """What an engine steps.

    Args:
        tensors: by name.
        are_parts: whether some tensors have their other parts on other ranks, so that the norm of these is not the
            model's.
        chosen_from: the tensors that these were chosen from.

    Attributes:
        are_behind: whether a backward inside ``no_sync()`` has left gradients that are not means yet; set only where
            ``chosen_from`` is None.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, are_parts: bool, chosen_from: "GuardedTensors | None" = None
    ) -> None:
        super().__init__(tensors)
        self._are_parts, self._chosen_from, self.are_behind = are_parts, chosen_from, False

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors.

        Raises:
            RuntimeError: see ``check_caller``.
        """
        self.check_caller(sys._getframe(1))
        return super().__iter__()

    def check_caller(self, caller: FrameType) -> None:
        """Refuse torch's clipping where these are parts or behind: ranks would scale theirs differently, or none.

        Raises:
            RuntimeError: it is the caller.
        """
        if self._are_parts and is_clipping(caller, by="clip_grad_norm_"):
            raise RuntimeError(
                "engine.step_tensors(): these are this rank's parts, and torch.nn.utils.clip_grad_norm_ would compute "
                "a different norm on each rank; write engine.clip_grad_norm_(max_norm)"
            )
        if (self._chosen_from or self).are_behind and is_clipping(caller):
            raise RuntimeError(
                "engine.step_tensors(): gradients are not means yet, after a backward inside no_sync(); write "
                "engine.clip_grad_norm_(max_norm), or engine.finish_gradients() before torch's clipping"
            )

    def _chosen(self, tensors: Mapping[str, Tensor]) -> "GuardedTensors":
        return GuardedTensors(tensors, are_parts=self._are_parts, chosen_from=self._chosen_from or self)


class GroupTensors(list[Tensor]):
    """The tensors of one of an optimizer's groups.

    Args:
        group: the optimizer's own list.
        check_caller: refuses some of those who iterate over it.
    """

    def __init__(self, group: Sequence[Tensor], check_caller: Callable[[FrameType], None]) -> None:
        super().__init__(group)
        self._check_caller = check_caller

    def __iter__(self) -> Iterator[Tensor]:
        self._check_caller(sys._getframe(1))
        return super().__iter__()

    def __reduce__(self) -> tuple[type[list[Tensor]], tuple[list[Tensor]]]:
        # A copy of the optimizer belongs to no engine.
        return list, (list(self),)


def guard_groups(optimizer: torch.optim.Optimizer, check_caller: Callable[[FrameType], None]) -> None:
    """Make an optimizer's groups refuse torch's clipping as ``check_caller`` does."""
    for group in optimizer.param_groups:
        group["params"] = GroupTensors(group["params"], check_caller)


def is_clipping(caller: FrameType, by: str = "") -> bool:
    """Whether torch's clipping is the caller. Looking at its frame is a last resort: torch has no hook on clipping."""
    return caller.f_code.co_name.startswith(by) and caller.f_globals.get("__name__") == "torch.nn.utils.clip_grad"
