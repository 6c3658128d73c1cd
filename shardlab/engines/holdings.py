"""What a rank holds of a parameter, as rows that a table takes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardlab.vocabulary import Role


@dataclass(frozen=True)
class ShardRow:
    """One piece of a tensor that this rank holds: elements ``start`` to ``stop`` of the flattened parameter."""

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
