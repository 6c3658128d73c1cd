"""What a rank holds of a parameter, as rows that a table takes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardlab.partition.slices import TensorSlice, stretches
from shardlab.vocabulary import Role


@dataclass(frozen=True)
class ShardRow:
    """One piece of a tensor that this rank holds: elements ``start`` to ``stop`` of the flattened whole parameter."""

    parameter: str
    shape: tuple[int, ...]
    role: Role
    bucket: int
    start: int
    stop: int
    num_bytes: int


def held(param: Tensor, state: Mapping[str, Any], gradient: Tensor | None) -> Iterator[tuple[Role, int]]:
    """Roles and bytes of what is held for one (piece of a) parameter."""
    yield Role.PARAMETER, param.nbytes
    if gradient is not None:
        yield Role.GRADIENT, gradient.nbytes
    if held := sum(value.nbytes for key, value in state.items() if isinstance(value, Tensor) and key != "step"):
        yield Role.OPTIMIZER_STATE, held


def in_whole_parameters(rows: Iterable[ShardRow], slices: Mapping[str, TensorSlice]) -> list[ShardRow]:
    """Rows whose elements count in the slices of a tensor-parallel model, as rows that count in its whole parameters.

    Columns of a matrix lie in as many stretches as it has rows, each of which becomes a row of its own.
    """
    found = []
    for row in rows:
        slice_ = slices.get(row.parameter)
        if slice_ is None:
            found.append(row)
            continue
        each = row.num_bytes // max(1, row.stop - row.start)
        found += [
            replace(row, shape=slice_.full_shape, start=start, stop=stop, num_bytes=each * (stop - start))
            for start, stop in stretches(slice_, row.start, row.stop)
        ]
    return found
