"""Reading element ranges out of the files of a checkpoint: a rank reads only what it needs.

A file holds a stretch of a flattened parameter or, of a tensor-parallel model, of a slice of one. A rank that loads at
another tensor-parallel size needs a stretch of another slice, or of the whole: it reads the whole parameter, one after
another, and cuts that. Slices themselves are in ``partition/slices.py``.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardlab.comm.slices import cut, put
from shardlab.engines.checkpoint.manifest import Row
from shardlab.partition.slices import TensorSlice


class ShardFiles:
    """The safetensors files of one version; each is opened when it is first needed.

    Args:
        folder: of the version.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Open as long as this object: a rank reads many ranges of few files, and opening one parses its whole header.
        self._files: dict[str, Any] = {}

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
        wanted: tuple[int, list[list[int]] | None] = 0, None
        if slice_ is not None and slice_.num_ranks > 1:
            wanted = slice_.dim, [list(pair) for pair in slice_.ranges]
        if alike := [row for row in rows if (row.dim, row.ranges) == wanted]:
            return self._read_stretch(alike, start, stop)
        whole = self._read_whole(rows)
        part = whole if slice_ is None else cut(whole, slice_)
        return part.reshape(-1)[start:stop].clone()  # a view would keep all of it

    def _read_stretch(self, rows: Sequence[Row], start: int, stop: int) -> Tensor:
        """Read from rows that were saved as one slice."""
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

    def _read_whole(self, rows: Sequence[Row]) -> Tensor:
        """The whole tensor of these rows."""
        shape, dim = list(rows[0].shape), rows[0].dim
        whole, found = torch.empty(shape, dtype=getattr(torch, rows[0].dtype)), 0
        slices: dict[str, list[Row]] = {}
        for row in rows:
            slices.setdefault(str(row.ranges), []).append(row)
        for same in slices.values():
            ranges = same[0].ranges or [[0, whole.shape[dim]]]
            shape[dim] = width = sum(stop - start for start, stop in ranges)
            put(self._read_stretch(same, 0, prod(shape)).view(shape), dim, ranges, whole)
            found += width
        if found < whole.shape[dim]:
            raise ValueError(f"manifest: slices of {rows[0].tensor_name!r} are in no file")
        return whole

    def slice(self, row: Row, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of what one file holds of a tensor; nothing else is read from disk."""
        if row.file not in self._files:
            self._files[row.file] = safe_open(self._folder / row.file, framework="pt")
        part: Tensor = self._files[row.file].get_slice(row.tensor_name)[start:stop]
        return part
