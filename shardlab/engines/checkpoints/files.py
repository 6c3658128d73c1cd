"""Reading element ranges out of the files of a checkpoint: a rank reads what it needs, not what others need."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from shardlab.engines.checkpoints.manifest import Row


class ShardFiles:
    """The safetensors files of one version; each is opened when it is first needed.

    Args:
        folder: of the version.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def read(self, rows: Sequence[Row], start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor that ``rows`` divide among files, [stop - start].

        Raises:
            ValueError: an element is in no file, or a file cannot be read.
        """
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
