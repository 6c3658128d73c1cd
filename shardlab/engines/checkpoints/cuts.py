"""Elements of one slice of a parameter, found among those of other slices: so a checkpoint changes its tensor axis.

A file holds a stretch of a flattened slice, and whoever loads needs a stretch of another one, or of the whole. Both
name their elements by the place in the full parameter: from the place in the slice that is wanted, to the place in the
full parameter, to the place in the slice that was saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardlab.partition.slices import TensorSlice


@dataclass(frozen=True)
class Cut:
    """A slice, or the whole, of a parameter of ``full_shape``: indices ``ranges`` along ``dim``."""

    full_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int], slice_: TensorSlice | None) -> "Cut":
        """A slice; without one all of a tensor of this shape."""
        if slice_ is None or slice_.num_ranks == 1:
            return cls(tuple(shape), 0, ((0, shape[0] if shape else 1),))
        return cls(slice_.full_shape, slice_.dim, slice_.ranges)

    def full_place(self, place: Tensor) -> Tensor:
        """Where elements of the flattened slice are in the flattened full parameter, int64."""
        indices = torch.cat([torch.arange(start, stop) for start, stop in self.ranges])
        outer, along, inner = self._split(place, len(indices))
        return (outer * self._size + indices[along]) * self._inner + inner

    def own_place(self, full: Tensor) -> Tensor:
        """Where elements of the flattened full parameter are in the flattened slice, int64; -1 for none of it."""
        width = sum(stop - start for start, stop in self.ranges)
        indices = torch.full((self._size,), -1)
        begin = 0
        for start, stop in self.ranges:
            indices[start:stop] = torch.arange(begin, begin + stop - start)
            begin += stop - start
        outer, along, inner = self._split(full, self._size)
        return torch.where(indices[along] < 0, -1, (outer * width + indices[along]) * self._inner + inner)

    def _split(self, place: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices before ``dim`` (flattened), along it, and behind it (flattened)."""
        inner = place % self._inner
        rest = place // self._inner
        return rest // size, rest % size, inner

    @property
    def _size(self) -> int:
        return self.full_shape[self.dim] if self.full_shape else 1

    @property
    def _inner(self) -> int:
        return prod(self.full_shape[self.dim + 1 :])
