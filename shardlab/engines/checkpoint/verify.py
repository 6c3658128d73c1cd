"""What is checked of a checkpoint before anything of an engine changes: that the files are as they were written.

A checksum finds bytes that were changed. The other checks are for a manifest that was edited, or written by another
program: names must not lead out of the folder, and rows, files and parameters must say the same.

Each file is read once, by one rank: for P fp32 parameters with Adam 12P/N bytes per rank, and no memory. CRC-32 runs at
about 1.5 GB/s of a core, and the files are in the page cache when they are read again.
"""

import re
from collections.abc import Iterable
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from shardlab.engines.checkpoint.directory import checksum
from shardlab.engines.checkpoint.manifest import Manifest, Row
from shardlab.engines.checkpoint.shard_files import IndexRanges, ShardFiles
from shardlab.engines.checkpoint.shards import Kind

_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_MOST_STEPS = 10**12  # a thousand a second for thirty years


def check_manifest(manifest: Manifest) -> None:
    """Check what can be checked without the files.

    Raises:
        ValueError: a number of steps, a name, a dtype or a range of elements cannot be.
    """
    if not is_number_of_steps(manifest.num_steps):
        raise ValueError(f"manifest: num_steps is {manifest.num_steps!r}; it is a whole number from 0 to {_MOST_STEPS}")
    for file in {*manifest.checksums, *(row.file for row in manifest.rows)}:
        if not _FILE.fullmatch(str(file)):
            raise ValueError(
                f"manifest: {file!r} is no file of a checkpoint; these are rank-00000.safetensors and so on"
            )
    for row in manifest.rows:
        _check_row(row, manifest)
    described = ((Kind.PARAMETER, manifest.parameters), (Kind.BUFFER, manifest.buffers))
    for kind, name, saved in ((kind, name, saved) for kind, all_ in described for name, saved in all_.items()):
        rows = manifest.tensors_of(kind, name).get("", [])
        _check_complete(f"{kind}/{name}", saved["shape"], rows)
        if any((row.shape, row.dtype) != (saved["shape"], saved["dtype"]) for row in rows):
            raise ValueError(f"manifest: rows of {kind} {name!r} have not its shape and dtype")
    for name in manifest.parameters:
        for key, rows in manifest.tensors_of(Kind.STATE, name).items():
            _check_complete(f"{Kind.STATE}/{key}/{name}", rows[0].shape, rows)


def check_present(folder: Path, manifest: Manifest) -> None:
    """Check that every file in the manifest exists.

    Raises:
        ValueError: one is missing.
    """
    for file in sorted(manifest.checksums):
        if not (folder / file).is_file():
            raise ValueError(f"file: {folder / file} is missing")


def check_files(folder: Path, manifest: Manifest, number: int, num_ranks: int) -> None:
    """Check every ``num_ranks``-th file, from file ``number`` on: its checksum, and its tensors against their rows.

    Raises:
        ValueError: a file was changed, or holds something else than the manifest says.
    """
    own = sorted(manifest.checksums)[number::num_ranks]
    for file in own:
        path = folder / file
        # Formats 1 and 2 have none.
        if (written := manifest.checksums[file]) and written != (found := checksum(path)):
            raise ValueError(
                f"file: {path} is damaged: its checksum is {found}, and was {written} when it was written; "
                "load another version, or a copy"
            )
    # After the checksums: a damaged file gets the error that says so, and not one about its contents.
    with ShardFiles(folder) as files:
        for row in (row for row in manifest.rows if row.file in own):
            first = files.checked(row)
            if row.key == "step" and _is_counter(row, manifest) and not is_number_of_steps(first):
                where = f"{row.tensor_name!r} in {folder / row.file}"
                raise ValueError(f"file: {where} is {first}, which no step counter is")


def is_number_of_steps(value: Any) -> bool:
    """Whether it may be a number of steps; Adam keeps it as a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isfinite(value) and 0 <= value <= _MOST_STEPS and value == int(value)


def _is_counter(row: Row, manifest: Manifest) -> bool:
    """Whether it is one number for several elements; of a parameter with one element it may be the element's state."""
    return bool(prod(row.shape) == 1 < prod(manifest.parameters[row.name]["shape"]))


def _check_row(row: Row, manifest: Manifest) -> None:
    numbers = [row.start, row.stop, row.dim, *row.shape, *(index for pair in row.ranges or () for index in pair)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"manifest: a row of {row.tensor_name!r} has a number that is no size and no place: {numbers}")
    if not isinstance(getattr(torch, str(row.dtype), None), torch.dtype):
        raise ValueError(f"manifest: {row.tensor_name!r} has dtype {row.dtype!r}, which is no dtype of torch")
    if row.file not in manifest.checksums:
        raise ValueError(f"manifest: {row.tensor_name!r} is in {row.file}, which has no checksum")


def _check_complete(what: str, shape: list[int], rows: Iterable[Row]) -> None:
    """Check that the rows of each slice have all its elements, and the slices all indices."""
    by_slice: dict[IndexRanges, list[Row]] = {}
    for row in rows:
        by_slice.setdefault(IndexRanges.of_row(row), []).append(row)
    for slice_, same in by_slice.items():
        _check_seamless(what, slice_.numel, ((row.start, row.stop) for row in same))
    if prod(shape):
        dim = next((slice_.dim for slice_ in by_slice), 0)
        _check_seamless(what, shape[dim] if shape else 1, (pair for slice_ in by_slice for pair in slice_.ranges))


def _check_seamless(what: str, length: int, ranges: Iterable[tuple[int, int]]) -> None:
    place = 0
    for start, stop in sorted(ranges):
        if start > place or stop <= start:
            break
        place = max(place, stop)
    if place != length:
        raise ValueError(
            f"manifest: the rows of {what} do not have its {length} places: they end, or break, at {place}"
        )
