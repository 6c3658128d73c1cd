"""What autograd saves for backward, without the weights.

A linear layer saves its weight for the gradient of its input. Were that the gathered tensor, a unit that reshards after
forward would free nothing. So a saved tensor that lies in a gathered parameter is saved as "these strides of that
parameter of that unit", and when backward asks for it the unit is gathered again, unless a prefetch has done so.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.engines.sharded_unit import ShardedUnit


@dataclass(frozen=True)
class _Reference:
    unit: ShardedUnit
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # against the parameter's own storage offset


@contextlib.contextmanager
def saved_by_reference(units: Sequence[ShardedUnit]) -> Iterator[None]:
    """Inside, autograd saves gathered parameters of ``units`` by reference."""

    def pack(saved: Tensor) -> Tensor | _Reference:
        address = saved.untyped_storage().data_ptr()
        for unit in units:
            if address in unit.addresses:
                for name, full in unit.full.items():
                    if full.untyped_storage().data_ptr() == address and _inside(saved, full):
                        offset = int(saved.storage_offset() - full.storage_offset())
                        return _Reference(unit, name, saved.size(), saved.stride(), offset)
        # Not ``saved`` itself: an operation that saves its own output would hold itself, and a graph that never runs
        # backward would keep its activations for ever.
        return saved.detach()

    def unpack(packed: Tensor | _Reference) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.unit.unshard()
        full = packed.unit.full[packed.name]
        return full.as_strided(packed.size, packed.stride, full.storage_offset() + packed.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _inside(saved: Tensor, full: Tensor) -> bool:
    return full.storage_offset() <= saved.storage_offset() < full.storage_offset() + max(1, full.numel())
