"""Slices of full tensors: each rank cuts its own, and all ranks of the tensor axis merge theirs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.partition.slices import TensorSlice


def cut(full: Tensor, slice_: TensorSlice) -> Tensor:
    """A contiguous copy of what ``slice_`` holds of a tensor of its full shape.

    Raises:
        ValueError: the tensor has another shape.
    """
    if tuple(full.shape) != slice_.full_shape:
        raise ValueError(f"full: shape {tuple(full.shape)} is given; {slice_.full_shape} is needed")
    parts = [full.detach().narrow(slice_.dim, start, stop - start) for start, stop in slice_.ranges]
    return torch.cat(parts, slice_.dim)


def put(part: Tensor, dim: int, ranges: Sequence[Sequence[int]], full: Tensor) -> None:
    """Write a slice, which has these ranges along ``dim``, to its place in a full tensor."""
    widths = [stop - start for start, stop in ranges]
    for (start, _), width, piece in zip(ranges, widths, part.split(widths, dim), strict=True):
        full.narrow(dim, start, width).copy_(piece)


def merge(own: Tensor, slice_: TensorSlice, comm: Communicator, *, tag: str = "") -> Tensor:
    """The full tensor on every rank, a copy; sends S(N-1)/N of its S elements a rank; blocking.

    Args:
        own: what this rank holds, of the slice's shape.
        slice_: which part that is.
        comm: the ranks of all slices.
        tag: what the tensor is.
    """
    # All parts and the full tensor are held at once: twice the full size until this returns.
    buffer = own.new_empty(comm.num_ranks * own.numel())
    comm.all_gather(buffer, own.detach().reshape(-1), tag=tag).wait()
    full = own.new_empty(slice_.full_shape)
    for rank, part in enumerate(buffer.view(comm.num_ranks, *own.shape)):
        put(part, slice_.dim, slice_.of_rank(rank).ranges, full)
    return full


def merge_state(state: Mapping[str, Any], slices: Mapping[str, TensorSlice], comm: Communicator) -> dict[str, Any]:
    """A state dict with full tensors where this rank's has slices, copies; the same on every rank, collective.

    Args:
        state: this rank's, by name.
        slices: of those that are slices, by name.
        comm: the ranks of all slices.
    """
    return {
        name: merge(value, slices[name], comm, tag=f"state {name}")
        if name in slices
        else value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }  # fmt: skip


def cut_state(state: Mapping[str, Any], slices: Mapping[str, TensorSlice]) -> dict[str, Any]:
    """This rank's slices of a full state dict; what is no slice stays as it is.

    Raises:
        ValueError: a tensor has another shape than the full parameter.
    """
    return {name: cut(value, slices[name]) if name in slices else value for name, value in state.items()}
