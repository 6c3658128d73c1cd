"""The manifest: one JSON file that says what a checkpoint holds and which file holds which elements of which tensor.

It names no rank, bucket or unit, only parameters and element ranges, so that any strategy at any number of ranks finds
what it needs. Ranges of a tensor-parallel model's parameter count in a slice of it, which is named by dim and indices.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from shardlab.engines.checkpoints.codec import decode, encode
from shardlab.engines.checkpoints.cuts import Cut
from shardlab.engines.checkpoints.shards import Kind, TensorShard
from shardlab.vocabulary import dtype_name

FORMAT = 2  # 1 knew no slices
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Row:
    """Elements ``start`` to ``stop`` of a flattened tensor, or of its slice, lie in ``file``.

    ``shape`` is the whole tensor's; a slice has the indices ``ranges`` along ``dim``, None is all of it. The other
    fields are as in ``TensorShard``.
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

    @property
    def cut(self) -> Cut:
        """The slice in which ``start`` and ``stop`` count."""
        if self.ranges is None:
            return Cut.of(self.shape, None)
        return Cut(tuple(self.shape), self.dim, tuple((start, stop) for start, stop in self.ranges))

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)

    @property
    def tensor_name(self) -> str:
        """The tensor's name inside the file."""
        return "/".join(part for part in (self.kind, self.key, self.name) if part)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        strategy: that wrote it.
        num_ranks: that wrote it.
        num_steps: steps taken.
        optimizer: name of the optimizer's class.
        groups: parameter groups, with ``params`` as names.
        parameters: shape and dtype of every parameter by name.
        buffers: likewise of the buffers that a state dict has.
        values: the optimizer's state that is not tensors, by parameter.
        module_state: what ``get_extra_state()`` of submodules gave, by module.
        objects: state dicts of what was saved beside the engine.
        rng: random generators, by rank.
        extra: the user's own.
        rows: where the tensors are.
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

    @cached_property
    def _index(self) -> dict[tuple[str, str], dict[str, list[Row]]]:
        index: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for row in self.rows:
            index.setdefault((row.kind, row.name), {}).setdefault(row.key, []).append(row)
        return index

    def tensors_of(self, kind: Kind, name: str) -> Mapping[str, list[Row]]:
        """The rows of one parameter's (or buffer's) tensors, by key."""
        return self._index.get((kind, name), {})

    @property
    def files(self) -> list[str]:
        """Every file that holds tensors."""
        return sorted({row.file for row in self.rows})

    def to_json(self) -> dict[str, Any]:
        """As it is written; floats, tuples and tensors inside are encoded."""
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        whole["rows"] = [row.to_json() for row in self.rows]
        return {"format": FORMAT, **{key: encode(value, key) for key, value in whole.items()}}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one version of a checkpoint.

    Raises:
        ValueError: it is missing, damaged, or of a newer format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"manifest: {path} is missing")
    try:
        written = json.loads(path.read_text())
        format_number = int(written.pop("format"))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"manifest: {path} is damaged: {error}") from None
    if format_number > FORMAT:
        raise ValueError(f"manifest: {path} has format {format_number}; this version of shardlab reads up to {FORMAT}")
    try:
        rows = [Row(**row) for row in written.pop("rows")]
        return Manifest(**{key: decode(value) for key, value in written.items()}, rows=rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"manifest: {path} is damaged: {error}") from None
