"""Reading element ranges out of the files of a checkpoint: a rank reads what it needs, not what others need."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from shardlab.engines.checkpoints.cuts import Cut
from shardlab.engines.checkpoints.manifest import Row
from shardlab.partition.slices import TensorSlice

_AT_ONCE = 2**20  # elements; their places take 8 bytes each, several times


class ShardFiles:
    """The safetensors files of one version; each is opened when it is first needed.

    Args:
        folder: of the version.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def read(self, rows: Sequence[Row], start: int, stop: int, slice_: TensorSlice | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor that ``rows`` divide among files, [stop - start].

        Args:
            rows: of one tensor, all of them.
            start: first element.
            stop: one past the last.
            slice_: in which they count; None for the whole tensor.

        Raises:
            ValueError: an element is in no file, or a file cannot be read.
        """
        cut = Cut.of(rows[0].shape, slice_)
        if alike := [row for row in rows if row.cut == cut]:
            return self._read_stretch(alike, start, stop)
        steps = range(start, stop, _AT_ONCE)
        parts = [self._read_across(rows, cut, begin, min(begin + _AT_ONCE, stop)) for begin in steps]
        return torch.cat(parts) if parts else torch.empty(0, dtype=getattr(torch, rows[0].dtype))

    def _read_stretch(self, rows: Sequence[Row], start: int, stop: int) -> Tensor:
        """Of rows that were saved in the slice that is wanted."""
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

    def _read_across(self, rows: Sequence[Row], cut: Cut, start: int, stop: int) -> Tensor:
        """Of rows that were saved in other slices."""
        result = torch.empty(stop - start, dtype=getattr(torch, rows[0].dtype))
        missing = torch.ones(stop - start, dtype=torch.bool)
        full = cut.full_place(torch.arange(start, stop))
        for row in rows:
            place = row.cut.own_place(full)
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
        """Elements ``start`` to ``stop`` of what one file holds of a tensor; nothing else is read from the disk."""
        path = self._folder / row.file
        try:
            if row.file not in self._open:
                opened = safe_open(path, framework="pt")
                self._open[row.file] = self._stack.enter_context(opened)
            part: Tensor = self._open[row.file].get_slice(row.tensor_name)[start:stop]
        except Exception as error:  # safetensors has an error of its own, which is not a ValueError
            raise ValueError(f"file: {row.tensor_name!r} cannot be read from {path}: {error}") from error
        if part.numel() != stop - start:
            raise ValueError(f"file: {path} has fewer elements of {row.tensor_name!r} than it should")
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._open.clear()
