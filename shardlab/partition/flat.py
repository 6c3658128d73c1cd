"""A flat layout: many parameters laid end to end as one range of elements, and that range cut into a chunk per rank.

This is the shape of a bucket under every strategy, unless FSDP cuts by rows (``dim0``): each rank keeps its own chunk,
and in a layout of one rank that is everything. Two cuts:

- ``flat_layout``: parameters one after another, equal chunks, padding at the end. A chunk border may run through a
  parameter, so a rank holds *pieces*; every collective has equal parts.
- ``owned_layout``: whole parameters, reordered so that the chunk of a rank is exactly what it owns. No padding, no cut
  parameter, but uneven chunks.

::

    flat_layout    | a a a a b b | b c c c c . |        owned_layout   | a a a a c c c c | b b b |
                     rank 0        rank 1                                rank 0            rank 1

Legend: all offsets are in elements; ``start`` is included, ``stop`` is not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd

from shardlab.partition.chunks import Layout, ParamSpec, Piece, even_bounds

ALIGNED_NUMEL = 8  # elements: 16 bytes in a dtype of two bytes, more in wider ones


@dataclass(frozen=True)
class FlatLayout(Layout):
    """Parameters end to end from element 0; elements past the last one are padding, which belongs to none.

    The layout says nothing of dtype; a bucket of mixed dtypes is the caller's mistake (``assign_buckets`` keeps them
    apart by ``keys``).
    """

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins, and where the last one ends."""
        return tuple(accumulate((spec.numel for spec in self.specs), initial=0))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """As the base: a rank's chunk cut by every parameter."""
        chunk_start, chunk_stop = self.chunk(rank)
        found = []
        for spec, first in zip(self.specs, self.starts, strict=False):
            start, stop = max(first, chunk_start), min(first + spec.numel, chunk_stop)
            if start < stop:
                whole = stop - start == spec.numel
                found.append(Piece(spec.name, start, stop, start - first, stop - first, whole))
        return tuple(found)


def flat_layout(specs: Sequence[ParamSpec], num_ranks: int) -> FlatLayout:
    """Parameters in the given order, cut into equal chunks, padded at the end by fewer than ``num_ranks`` elements.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    return FlatLayout(even_bounds(sum(spec.numel for spec in specs), num_ranks), tuple(specs))


def aligned_first(specs: Iterable[ParamSpec]) -> list[ParamSpec]:
    """The order in which parameters are laid end to end: first those whose size keeps the next one aligned.

    A kernel reads a tensor 16 bytes at a time only if it begins at a multiple of 16 bytes, and ``view_as_complex``
    takes none that begins at an odd element. One odd size in front would shift all that come behind it; at the end it
    shifts nothing, and costs no padding. So multiples of 8 elements come first, then those of 4 and of 2: each
    parameter begins at a multiple of what divides its own size. Sizes are taken in elements, as the same layout serves
    several dtypes; within each kind the order stays. Where a chunk begins is another matter: ceil(numel / N) elements,
    or what an owner has, need be no multiple of 16 bytes, and padding them would be sent.
    """
    return sorted(specs, key=lambda spec: -gcd(spec.numel, ALIGNED_NUMEL))


def owned_layout(specs: Sequence[ParamSpec], owners: Sequence[int], num_ranks: int) -> FlatLayout:
    """Whole parameters, reordered by (owner, original order): the chunk of a rank is exactly what it owns.

    Args:
        specs: the parameters.
        owners: rank of each parameter; a rank may own none.
        num_ranks: ranks that share the range.

    Raises:
        ValueError: ``owners`` has another length than ``specs``.
    """
    bounds = [0] * (num_ranks + 1)
    for spec, owner in zip(specs, owners, strict=True):
        bounds[owner + 1] += spec.numel
    order = sorted(range(len(specs)), key=owners.__getitem__)  # stable: of one rank in the original order
    return FlatLayout(tuple(accumulate(bounds)), tuple(specs[index] for index in order))
