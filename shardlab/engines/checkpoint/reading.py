"""Reading element ranges out of the files of a checkpoint: a rank reads only what it needs.

A file holds a stretch of a flattened parameter or, of a tensor-parallel model, of a slice of one. A rank that loads may
need a stretch of another slice, or of the whole. So a checkpoint can be loaded at another tensor-parallel size: places
in the slice that is wanted are turned into places in the full parameter, and those into places in the slice that was
saved. Slices themselves are in ``partition/slices.py``.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from shardlab.engines.checkpoint.manifest import Row
from shardlab.partition.slices import TensorSlice

_AT_ONCE = 2**20  # elements read across slices at a time; each needs several int64 indices


@dataclass(frozen=True)
class IndexRanges:
    """Which indices along ``dim`` a slice has of a parameter of ``full_shape``; the whole has all of them."""

    full_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int], slice_: TensorSlice | None) -> "IndexRanges":
        """Those of a slice; without one, all of a tensor of this shape."""
        if slice_ is None or slice_.num_ranks == 1:
            return cls(tuple(shape), 0, ((0, shape[0] if shape else 1),))
        return cls(slice_.full_shape, slice_.dim, slice_.ranges)

    @classmethod
    def of_row(cls, row: Row) -> "IndexRanges":
        """Those of the slice that a row's ``start`` and ``stop`` refer to."""
        if row.ranges is None:
            return cls.of(row.shape, None)
        return cls(tuple(row.shape), row.dim, tuple((start, stop) for start, stop in row.ranges))

    def full_place(self, place: Tensor) -> Tensor:
        """Where elements of the flattened slice are in the flattened full parameter, int64."""
        indices = torch.cat([torch.arange(start, stop) for start, stop in self.ranges])
        outer, along, inner = self._split(place, len(indices))
        return (outer * self._size + indices[along]) * self._inner + inner

    def own_place(self, full: Tensor) -> Tensor:
        """Where elements of the flattened full parameter are in the flattened slice, int64; -1 if not in it."""
        width = sum(stop - start for start, stop in self.ranges)
        indices = torch.full((self._size,), -1)
        begin = 0
        for start, stop in self.ranges:
            indices[start:stop] = torch.arange(begin, begin + stop - start)
            begin += stop - start
        outer, along, inner = self._split(full, self._size)
        return torch.where(indices[along] < 0, -1, (outer * width + indices[along]) * self._inner + inner)

    def _split(self, place: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices before ``dim`` (flattened), along it, and after it (flattened)."""
        inner = place % self._inner
        rest = place // self._inner
        return rest // size, rest % size, inner

    @property
    def _size(self) -> int:
        return self.full_shape[self.dim] if self.full_shape else 1

    @property
    def _inner(self) -> int:
        return prod(self.full_shape[self.dim + 1 :])


class ShardFiles:
    """The safetensors files of one version; each is opened when it is first needed.

    Args:
        folder: of the version.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Kept open until __exit__: a rank reads many ranges of few files, and opening a file parses its whole header.
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def read(self, rows: Sequence[Row], start: int, stop: int, slice_: TensorSlice | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor that ``rows`` place in files, [stop - start].

        Args:
            rows: of one tensor, all of them.
            start: first element.
            stop: one past the last.
            slice_: the slice that start and stop refer to; None for the whole tensor.

        Raises:
            ValueError: an element is in no file.
        """
        wanted = IndexRanges.of(rows[0].shape, slice_)
        if alike := [row for row in rows if IndexRanges.of_row(row) == wanted]:
            return self._read_stretch(alike, start, stop)
        # In steps, since the indices of many elements at once would take more memory than the elements.
        steps = range(start, stop, _AT_ONCE)
        parts = [self._read_across(rows, wanted, begin, min(begin + _AT_ONCE, stop)) for begin in steps]
        return torch.cat(parts) if parts else torch.empty(0, dtype=getattr(torch, rows[0].dtype))

    def _read_stretch(self, rows: Sequence[Row], start: int, stop: int) -> Tensor:
        """Read from rows that were saved as the same slice."""
        first = rows[0]
        result = torch.empty(stop - start, dtype=getattr(torch, first.dtype))
        place = start
        for row in sorted(rows, key=lambda row: row.start):
            if row.start <= place < min(row.stop, stop):
                end = min(row.stop, stop)
                result[place - start : end - start] = self.slice(row, place - row.start, end - row.start)
                place = end
        if place < stop:
            raise ValueError(f"manifest: elements {place} to {stop} of {first.tensor_name!r} are in no file")
        return result

    def _read_across(self, rows: Sequence[Row], wanted: IndexRanges, start: int, stop: int) -> Tensor:
        """Read from rows that were saved as other slices."""
        result = torch.empty(stop - start, dtype=getattr(torch, rows[0].dtype))
        missing = torch.ones(stop - start, dtype=torch.bool)
        full = wanted.full_place(torch.arange(start, stop))
        for row in rows:
            place = IndexRanges.of_row(row).own_place(full)
            found = (place >= row.start) & (place < row.stop)
            if found.any():
                place = place[found]
                first, last = int(place.min()), int(place.max())
                result[found] = self.slice(row, first - row.start, last + 1 - row.start)[place - first]
                missing &= ~found
        if missing.any():
            raise ValueError(f"manifest: {int(missing.sum())} elements of {rows[0].tensor_name!r} are in no file")
        return result

    def slice(self, row: Row, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of what one file holds of a tensor; nothing else is read from disk."""
        if row.file not in self._files:
            self._files[row.file] = self._stack.enter_context(safe_open(self._folder / row.file, framework="pt"))
        part: Tensor = self._files[row.file].get_slice(row.tensor_name)[start:stop]
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # What read() returned are copies, so no file need stay mapped for them.
        self._stack.close()
        self._files.clear()
