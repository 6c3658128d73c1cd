"""The tensors an optimizer is built from, and those this rank steps, under the names of the user's module.

Two collections of one class: ``optimizer_fn`` gets the module's parameters, and ``engine.step_tensors()`` are what this
rank steps of them. An optimizer takes them directly, ``torch.optim.AdamW(tensors, lr=1e-3)``; parameter groups are
chosen by name, or by anything else that parameters have:

    torch.optim.AdamW([
        {"params": tensors.where(lambda name: name.endswith("bias")), "weight_decay": 0.0},
        {"params": tensors.where(lambda name: not name.endswith("bias"))},
    ], lr=1e-3)

Where a strategy shards, each parameter is then replaced in its group by the piece that this rank holds
(``over_pieces``): one-dimensional, or rows of a parameter in their shape; empty if this rank holds nothing of it. So
every rank makes the same groups, with the same indices.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from shardlab.partition.slices import TensorSlice


class StepTensors(Sequence[Tensor]):
    """Tensors with names, in the module's order: its parameters, or what this rank steps of each.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors.values())

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor, which torch's optimizers take as well."""
        return iter(self._tensors.items())

    def by_name(self, name: str) -> Tensor:
        """The tensor of one parameter."""
        return self._tensors[name]

    def where(self, wanted: Callable[[str], bool]) -> "StepTensors":
        """The tensors whose name ``wanted`` accepts."""
        return self._chosen({name: tensor for name, tensor in self._tensors.items() if wanted(name)})

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "StepTensors": ...
    def __getitem__(self, index: int | slice) -> "Tensor | StepTensors":
        if isinstance(index, slice):
            return self._chosen(dict(list(self._tensors.items())[index]))
        return list(self._tensors.values())[index]

    def _chosen(self, tensors: Mapping[str, Tensor]) -> "StepTensors":
        return StepTensors(tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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
