"""The tensors this rank steps, under the names of the user's module.

An optimizer takes them directly, ``torch.optim.AdamW(tensors, lr=1e-3)``; parameter groups are chosen by name:

    torch.optim.AdamW([
        {"params": tensors.where(lambda name: name.endswith("bias")), "weight_decay": 0.0},
        {"params": tensors.where(lambda name: not name.endswith("bias"))},
    ], lr=1e-3)

Where a strategy shards, each tensor is the piece this rank holds (one-dimensional, or rows of a parameter in their
shape), and is empty if this rank holds nothing of the parameter. So every rank makes the same groups, with the same
indices.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import override


@dataclass
class Choice:
    """By what a user has chosen tensors.

    Attributes:
        named: names of all tensors, and of those that ``where`` and slices have returned.
        are_seen: whether anybody but a constructor of ``torch.optim`` has had single tensors.
    """

    named: list[list[str]]
    are_seen: bool = False

    def is_by_name(self, groups: Sequence[Sequence[str]]) -> bool:
        """Whether all were taken, or some by their names: then neither values nor shapes have decided which.

        Args:
            groups: the names in each of an optimizer's groups.
        """
        return not self.are_seen and all(list(group) in self.named for group in groups)


class Group(NamedTuple):
    """What an optimizer was given: names of tensors, and those options for them that can be compared."""

    names: list[str]
    options: Mapping[str, object]


class StepTensors(Sequence[Tensor]):
    """A sequence of tensors that remembers their names; the order is the module's.

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
        self, tensors: Mapping[str, Tensor], *, are_parts: bool = False, chosen_from: "StepTensors | None" = None
    ) -> None:
        self._tensors, self.are_parts, self._chosen_from = dict(tensors), are_parts, chosen_from
        self.are_behind = False
        self._choice: Choice | None = None

    @override
    def __iter__(self) -> Iterator[Tensor]:
        """The tensors.

        Raises:
            RuntimeError: see ``check_caller``.
        """
        caller = sys._getframe(1)
        self.check_caller(caller)
        self._note_seen(by=caller)
        return iter(self._tensors.values())

    def check_caller(self, caller: FrameType) -> None:
        """Refuse torch's clipping where these are parts or behind: ranks would scale theirs differently, or none.

        Only where it is given the engine's own collection, or a group of its optimizer: a list that the user has made
        of the tensors is a list like any other.

        Raises:
            RuntimeError: it is the caller.
        """
        if self.are_parts and is_clipping(caller, by="clip_grad_norm_"):
            raise RuntimeError(
                "engine.step_tensors(): these are this rank's parts, and torch.nn.utils.clip_grad_norm_ would compute "
                "a different norm on each rank; write engine.clip_grad_norm_(max_norm)"
            )
        if (self._chosen_from or self).are_behind and is_clipping(caller):
            raise RuntimeError(
                "engine.step_tensors(): gradients are not means yet, after a backward inside no_sync(); write "
                "engine.clip_grad_norm_(max_norm), or engine.finish_gradients() before torch's clipping"
            )

    @contextlib.contextmanager
    def choosing(self) -> Iterator["Choice"]:
        """Inside, a user's function chooses from these; what is yielded says by what."""
        self._choice = Choice([list(self._tensors)])
        try:
            yield self._choice
        finally:
            self._choice = None

    @property
    def names(self) -> list[str]:
        """Parameter names, in the module's order."""
        return list(self._tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor, which torch's optimizers take as well."""
        self._note_seen()
        return iter(self._tensors.items())

    def by_name(self, name: str) -> Tensor:
        """The tensor of one parameter."""
        self._note_seen()
        return self._tensors[name]

    def where(self, wanted: Callable[[str], bool]) -> "StepTensors":
        """The tensors whose name ``wanted`` accepts."""
        chosen = {name: tensor for name, tensor in self._tensors.items() if wanted(name)}
        return self._chosen(chosen)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "StepTensors": ...
    @override
    def __getitem__(self, index: int | slice) -> "Tensor | StepTensors":
        if isinstance(index, slice):
            return self._chosen(dict(list(self._tensors.items())[index]))
        self._note_seen()
        return list(self._tensors.values())[index]

    def _note_seen(self, by: FrameType | None = None) -> None:
        choice = (self._chosen_from or self)._choice
        if choice is None:
            return
        # With itself among its variables: torch.optim may also run an iterator of the user's over it, such as a filter.
        is_torchs = by is not None and by.f_globals.get("__name__", "").startswith("torch.optim.")
        if by is None or not is_torchs or not any(value is self for value in by.f_locals.values()):
            choice.are_seen = True

    def _chosen(self, tensors: Mapping[str, Tensor]) -> "StepTensors":
        root = self._chosen_from or self
        if root._choice is not None:
            root._choice.named.append(list(tensors))
        return StepTensors(tensors, are_parts=self.are_parts, chosen_from=root)

    @override
    def __len__(self) -> int:
        return len(self._tensors)


class GroupTensors(list[Tensor]):
    """The tensors of one of the optimizer's groups: a list that torch's clipping cannot take either.

    Args:
        group: the optimizer's own list.
        tensors: the engine's, some of which these are.
    """

    def __init__(self, group: Sequence[Tensor], tensors: StepTensors) -> None:
        super().__init__(group)
        self._step_tensors = tensors

    @override
    def __iter__(self) -> Iterator[Tensor]:
        self._step_tensors.check_caller(sys._getframe(1))
        return super().__iter__()

    @override
    def __reduce__(self) -> tuple[type[list[Tensor]], tuple[list[Tensor]]]:
        # A copy of the optimizer belongs to no engine.
        return list, (list(self),)


OptimizerFn = Callable[[StepTensors], torch.optim.Optimizer]
"""Builds the optimizer from the tensors it is to step."""


def groups_of(optimizer: torch.optim.Optimizer, tensors: StepTensors) -> list[Group]:
    """The groups of an optimizer that steps some of ``tensors``."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [
        Group(
            [names.get(id(tensor), "") for tensor in group["params"]],
            {key: _comparable(value) for key, value in group.items() if key != "params"},
        )
        for group in optimizer.param_groups
    ]


def _comparable(option: object) -> object:
    """An option as numbers and text; None for any other object."""
    if isinstance(option, Tensor):
        return option.tolist()
    if isinstance(option, list | tuple):
        return tuple(map(_comparable, option))
    return option if isinstance(option, bool | int | float | str) else None


def guard_groups(optimizer: torch.optim.Optimizer, tensors: StepTensors) -> None:
    """Make the groups of an engine's optimizer refuse torch's clipping as the engine's ``tensors`` do."""
    for group in optimizer.param_groups:
        group["params"] = GroupTensors(group["params"], tensors)


def tensors_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of what an optimizer steps."""
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def is_clipping(caller: FrameType, by: str = "") -> bool:
    """Whether torch's clipping is the caller. Looking at its frame is a last resort: torch has no hook on clipping."""
    return caller.f_code.co_name.startswith(by) and caller.f_globals.get("__name__") == "torch.nn.utils.clip_grad"
