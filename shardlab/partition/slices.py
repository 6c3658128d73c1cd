"""Which part of a full parameter one tensor-parallel rank holds, and how its elements lie in the full one.

A slice is one or more ranges along one dim: the middle of a matrix's rows or columns, or, of a projection that makes
query, key and value at once, a range of each. A module whose parameters are slices says so in an attribute
``tensor_slices``, a mapping from its own parameters' names to slices; ``slices_of`` collects them over a model. Norms,
checkpoints and figures read it there and need not know what made the slices.

::

    4 rows, rank 1 of 2                              ranges ((2, 4),)
    query, key, value of 2 rows each, rank 1 of 2    ranges ((1, 2), (3, 4), (5, 6))
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from shardlab.partition.chunks import require_count

SLICES = "tensor_slices"


@dataclass(frozen=True)
class TensorSlice:
    """Elements whose index along ``dim`` lies in ``ranges``, of a parameter of ``full_shape``.

    Attributes:
        full_shape: of the whole parameter.
        dim: 0 or more.
        ranges: (start, stop) along ``dim``, in the order in which the slice has them.
        index: the rank that holds it.
        num_ranks: ranks whose slices are the whole together.
    """

    full_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    index: int
    num_ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        width = sum(stop - start for start, stop in self.ranges)
        return (*self.full_shape[: self.dim], width, *self.full_shape[self.dim + 1 :])

    def of_rank(self, index: int) -> "TensorSlice":
        """The slice of the same parameter that another rank holds."""
        parts = [stop - start for start, stop in self.ranges]
        return parts_slice(self.full_shape, self.dim, [size * self.num_ranks for size in parts], index, self.num_ranks)


class ModuleLike(Protocol):
    """The part of ``torch.nn.Module`` that is used here."""

    def named_modules(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Any]]: ...  # noqa: D102


def even_slice(full_shape: tuple[int, ...], dim: int, index: int, num_ranks: int) -> TensorSlice:
    """Part ``index`` of ``num_ranks`` equal ones along ``dim``.

    Raises:
        ValueError: the ranks do not divide the dim.
    """
    return parts_slice(full_shape, dim, [full_shape[dim]], index, num_ranks)


def parts_slice(full_shape: tuple[int, ...], dim: int, parts: Iterable[int], index: int, num_ranks: int) -> TensorSlice:
    """Share ``index`` of ``num_ranks`` equal shares of each of several parts, one after another along ``dim``.

    Args:
        full_shape: of the whole parameter.
        dim: 0 or more.
        parts: their sizes, which add up to the dim's.
        index: whose share.
        num_ranks: shares.

    Raises:
        ValueError: the ranks do not divide a part, or the parts do not add up to the dim.
    """
    require_rank(index, num_ranks)
    ranges, place = [], 0
    for size in parts:
        require_divisible(f"dim {dim} of {full_shape}", size, num_ranks)
        share = size // num_ranks
        ranges.append((place + index * share, place + (index + 1) * share))
        place += size
    if place != full_shape[dim]:
        raise ValueError(
            f"parts: they add up to {place}; they must add up to the {full_shape[dim]} of dim {dim} of {full_shape}"
        )
    return TensorSlice(tuple(full_shape), dim, tuple(ranges), index, num_ranks)


def require_rank(rank: int, num_ranks: int) -> None:
    """Raise ValueError when ``rank`` is not one of ``num_ranks`` ranks."""
    require_count("num_ranks", num_ranks, 1)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: {rank} is not one of the {num_ranks} ranks; it must be 0 to {num_ranks - 1}")


def require_divisible(what: str, size: int, num_ranks: int) -> None:
    """Raise ValueError, with the nearest sizes that work, unless ``num_ranks`` ranks get equal parts.

    Args:
        what: begins the error's text, for example 'out_features'.
        size: to be divided.
        num_ranks: ranks that get equal parts.
    """
    require_count("num_ranks", num_ranks, 1)
    if size % num_ranks == 0:
        return
    below = size // num_ranks * num_ranks
    nearest = " or ".join(str(number) for number in (below, below + num_ranks) if number)
    ranks = max(number for number in range(1, num_ranks) if size % number == 0)
    fewer = f", or {ranks} ranks" if ranks > 1 else ""
    raise ValueError(f"{what}: {size} does not divide over {num_ranks} tensor-parallel ranks; use {nearest}{fewer}")


def slices_of(module: ModuleLike) -> dict[str, TensorSlice]:
    """The slices of a model's parameters, by each of their names; a parameter without one is whole on every rank."""
    return {
        f"{prefix}.{name}" if prefix else name: found
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, found in getattr(owner, SLICES, {}).items()
    }


def stretches(slice_: TensorSlice, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where elements ``start`` to ``stop`` of a flattened slice are in the flattened parameter, as (start, stop)."""
    inner = prod(slice_.full_shape[slice_.dim + 1 :])
    size = slice_.full_shape[slice_.dim]
    place = 0
    for outer in range(prod(slice_.full_shape[: slice_.dim])):
        for first, last in slice_.ranges:
            begin, numel = (outer * size + first) * inner, (last - first) * inner
            low, high = max(start, place), min(stop, place + numel)
            if low < high:
                yield begin + low - place, begin + high - place
            place += numel
