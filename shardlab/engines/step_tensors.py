"""The tensors an optimizer is built from, and those this rank steps, under the names of the user's module.

An optimizer takes them directly, ``torch.optim.AdamW(tensors, lr=1e-3)``; parameter groups are chosen by name, or by
anything else that parameters have:

    torch.optim.AdamW([
        {"params": tensors.where(lambda name: name.endswith("bias")), "weight_decay": 0.0},
        {"params": tensors.where(lambda name: not name.endswith("bias"))},
    ], lr=1e-3)

It is built from the module's parameters. Where a strategy shards, each is then replaced in its group by the piece that
this rank holds (one-dimensional, or rows of a parameter in their shape), which is empty if this rank holds nothing of
it. So every rank makes the same groups, with the same indices.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import overload

import torch
from torch import Tensor

from shardlab.partition.slices import TensorSlice


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

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors.

        Raises:
            RuntimeError: see ``check_caller``.
        """
        self.check_caller(sys._getframe(1))
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
        return self._chosen(chosen)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "StepTensors": ...
    def __getitem__(self, index: int | slice) -> "Tensor | StepTensors":
        if isinstance(index, slice):
            return self._chosen(dict(list(self._tensors.items())[index]))
        return list(self._tensors.values())[index]

    def _chosen(self, tensors: Mapping[str, Tensor]) -> "StepTensors":
        return StepTensors(tensors, are_parts=self.are_parts, chosen_from=self._chosen_from or self)

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

    def __iter__(self) -> Iterator[Tensor]:
        self._step_tensors.check_caller(sys._getframe(1))
        return super().__iter__()

    def __reduce__(self) -> tuple[type[list[Tensor]], tuple[list[Tensor]]]:
        # A copy of the optimizer belongs to no engine.
        return list, (list(self),)


OptimizerFn = Callable[[StepTensors], torch.optim.Optimizer]
"""Builds the optimizer from the module's parameters."""


@contextlib.contextmanager
def shown_whole(params: Mapping[str, Tensor], slices: Mapping[str, TensorSlice]) -> Iterator[None]:
    """Inside, slices of tensor parallelism have the shapes that they are slices of, and one element of memory."""
    with torch._C.DisableTorchFunctionSubclass():  # of placeholders
        kept = {name: params[name].data for name in slices if name in params}  # tied ones have two names
        for name, data in kept.items():
            params[name].data = data.new_zeros(()).expand(slices[name].full_shape)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for name, data in kept.items():
                params[name].data = data


def over_pieces(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], pieces: Mapping[str, Tensor], *, are_slices: bool =
    False,
) -> torch.optim.Optimizer:  # fmt: skip
    """An optimizer that was built over the module's parameters, over what this rank steps of them.

    Args:
        optimizer: its groups are changed.
        params: by name.
        pieces: likewise.
        are_slices: whether some parameters had another shape when it was built.

    Raises:
        ValueError: its constructor has made state, and it cannot be built again from its groups and defaults.
    """
    piece_of = {id(param): pieces[name] for name, param in params.items()}
    for group in optimizer.param_groups:
        group["params"] = [piece_of.get(id(one), one) for one in group["params"]]
    if not (are_slices and optimizer.state) and all(piece_of.get(id(one), one) is one for one in optimizer.state):
        return optimizer
    kind, takes = type(optimizer), inspect.signature(type(optimizer)).parameters
    try:
        return kind(optimizer.param_groups, **{key: one for key, one in optimizer.defaults.items() if key in takes})
    except TypeError as error:
        raise ValueError(
            f"optimizer: {kind.__name__} makes state in its constructor, of whole parameters, and this rank steps "
            "pieces; make it in step()"
        ) from error


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
