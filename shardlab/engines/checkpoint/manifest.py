"""The manifest: one JSON file that says what a checkpoint holds and which file holds which elements of which tensor.

It names no rank, bucket or unit, only parameters and element ranges, so that any strategy at any number of ranks finds
what it needs. For a tensor-parallel model, ranges refer to a slice of the parameter, given by its dim and indices.

JSON has no tuples, no infinity, no tensors, and only text as keys. Schedulers, random generators and parameter groups
need them; each is written as an object with a key that begins with '!'. So a person can read the manifest and a program
can trust it: reading it runs no code.
"""

import base64
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.engines.checkpoint.directory import MANIFEST, read_json
from shardlab.engines.checkpoint.held_stretches import Kind, TensorShard
from shardlab.vocabulary import dtype_name

FORMAT = 3
_MARK = "!"


@dataclass(frozen=True)
class Row:
    """Elements ``start`` to ``stop`` of a flattened tensor, or of a slice of it, are in ``file``.

    ``shape`` is the whole tensor's; a slice has the indices ``ranges`` along ``dim``, and None means all of it. The
    other fields are as in ``TensorShard``.
    """

    kind: str
    name: str
    key: str
    shape: list[int]
    dtype: str
    start: int
    stop: int
    file: str
    dim: int = 0
    ranges: list[list[int]] | None = None

    @classmethod
    def of(cls, shard: TensorShard, file: str) -> "Row":
        """The row of a shard that is written to ``file``."""
        slice_, dtype = shard.slice_, dtype_name(shard.tensor.dtype)
        where = (shard.start, shard.stop, file)
        if slice_ is None or slice_.num_ranks == 1:
            return cls(shard.kind, shard.name, shard.key, list(shard.shape), dtype, *where)
        ranges = [list(pair) for pair in slice_.ranges]
        return cls(shard.kind, shard.name, shard.key, list(slice_.full_shape), dtype, *where, slice_.dim, ranges)

    def to_json(self) -> dict[str, Any]:
        """The form that is written; notebooks make tables of it."""
        return asdict(self)

    @property
    def tensor_name(self) -> str:
        """The tensor's name inside the file."""
        return "/".join(part for part in (self.kind, self.key, self.name) if part)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        strategy: the one that wrote it.
        num_ranks: how many wrote it.
        num_steps: steps taken.
        optimizer: name of the optimizer's class.
        groups: parameter groups, with ``params`` as names.
        parameters: shape and dtype of every parameter by name.
        buffers: likewise for the buffers in a state dict.
        values: optimizer state that is not tensors, by parameter.
        module_state: what ``get_extra_state()`` of submodules returned, by module.
        objects: state dicts of the objects saved with the engine.
        rng: random generators, by rank.
        extra: the user's own.
        rows: where the tensors are.
        checksums: of the files that hold them, by name (``directory.checksum``).
    """

    strategy: str
    num_ranks: int
    num_steps: int
    optimizer: str
    groups: list[dict[str, Any]]
    parameters: dict[str, dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    values: dict[str, dict[str, Any]]
    module_state: dict[str, Any]
    objects: dict[str, dict[str, Any]]
    rng: list[dict[str, Any]]
    extra: Any
    rows: list[Row]
    checksums: dict[str, str]

    @cached_property
    def _index(self) -> dict[tuple[str, str], dict[str, list[Row]]]:
        index: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for row in self.rows:
            index.setdefault((row.kind, row.name), {}).setdefault(row.key, []).append(row)
        return index

    def tensors_of(self, kind: Kind, name: str) -> Mapping[str, list[Row]]:
        """The rows of one parameter's (or buffer's) tensors, by key."""
        return self._index.get((kind, name), {})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one version of a checkpoint.

    Raises:
        ValueError: it is missing, damaged, or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"manifest: {path} is missing")
    try:
        written = read_json(path)
        if (number := written.pop("format")) == FORMAT:
            del written["checksum"]  # which ``read_json`` has checked
            rows = [Row(**row) for row in written.pop("rows")]
            return Manifest(**{key: decode(value) for key, value in written.items()}, rows=rows)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"manifest: {path} is damaged: {error}") from None
    raise ValueError(f"manifest: {path} has format {number}; this version of shardlab reads format {FORMAT}")


def encode(value: Any, where: str) -> Any:
    """Turn ``value`` into something ``json.dumps`` takes.

    Args:
        value: None, numbers, text, tensors, and lists, tuples and mappings of them.
        where: the beginning of the error text, for example 'scheduler'.

    Raises:
        ValueError: it holds anything else; the message says where and what.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": str(float(value))}
    if isinstance(value, list):
        return [encode(entry, f"{where}[{place}]") for place, entry in enumerate(value)]
    if isinstance(value, tuple):
        return {"!tuple": encode(list(value), where)}
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    raise ValueError(
        f"{where}: a checkpoint holds numbers, text, tensors, lists, tuples and dicts, not {type(value).__name__}"
    )


def decode(value: Any) -> Any:
    """The value that ``encode`` was given."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "!float" in value:
        return float(value["!float"])
    if "!tuple" in value:
        return tuple(decode(value["!tuple"]))
    if "!tensor" in value:
        return _decode_tensor(value)
    if "!dict" in value:
        return {decode(key): decode(entry) for key, entry in value["!dict"]}
    if "!counter" in value:  # MultiStepLR keeps its milestones in one
        return Counter({decode(key): count for key, count in value["!counter"]})
    return {key: decode(entry) for key, entry in value.items()}


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {"!counter": [[encode(key, where), count] for key, count in value.items()]}
    if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return {key: encode(entry, f"{where}.{key}") for key, entry in value.items()}
    return {"!dict": [[encode(key, where), encode(entry, f"{where}[{key!r}]")] for key, entry in value.items()]}


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"!tensor": base64.b64encode(raw).decode(), "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def _decode_tensor(value: dict[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, value["dtype"])
    raw = bytearray(base64.b64decode(value["!tensor"]))
    # frombuffer refuses an empty buffer.
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
