"""A dim-0 layout: every parameter of a unit is cut into blocks of whole rows, and a rank's chunk is its blocks.

In a ``flat`` layout a chunk border may run anywhere through a parameter; here it runs only between rows (indices of dim
0), so a rank's piece keeps the parameter's other dims and can be viewed as rows. The price is
padding: a block is ceil(rows / N) rows on every rank that has that many left, and the chunks are padded to the largest,
which is rank 0's, so that every collective has equal parts.

::

    a has 3 rows of 2, b has 1 row of 2, c is 0-d, 2 ranks       | a a a a b b c | a a . . . . . |
                                                                   rank 0          rank 1

The gathered buffer is rank-major: rank r's chunk begins at ``r * chunk``, so a parameter that several ranks hold does
not lie in one stretch of it (with one rank it does); ``pieces`` says where its blocks are.

Legend: all offsets are in elements; ``start`` is included, ``stop`` is not. A 0-d parameter counts as one row.
Source of the cut: the per-parameter sharding of torch's ``fully_shard`` (FSDP2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlab.partition.chunks import Layout, ParamSpec, Piece, require_count


@dataclass(frozen=True)
class Dim0Layout(Layout):
    """Parameters, each cut along dim 0 into a block for each rank.

    ``flat_start`` to ``flat_stop`` of a piece is its place in the gathered, padded, rank-major buffer. Padding is at
    the end of each chunk.
    """

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """As the base: the rows of each parameter."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(self._cut(rank)) for rank in range(self.num_ranks))

    def _cut(self, rank: int) -> list[Piece]:
        found = []
        place = self.bounds[rank]
        for spec in self.specs:
            start, stop = _block(spec, rank, self.num_ranks)
            if start < stop:
                whole = stop - start == spec.numel
                found.append(Piece(spec.name, place, place + stop - start, start, stop, whole))
            place += stop - start
        return found


def dim0_layout(specs: Sequence[ParamSpec], num_ranks: int) -> Dim0Layout:
    """Parameters in the given order, each cut into blocks of ceil(rows / num_ranks) rows, the last shorter or empty.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    require_count("num_ranks", num_ranks, 1)
    # Every chunk is as large as that of rank 0, which has a full block of everything.
    chunk_numel = sum(_block(spec, 0, num_ranks)[1] for spec in specs)
    return Dim0Layout(tuple(rank * chunk_numel for rank in range(num_ranks + 1)), tuple(specs))


def _block(spec: ParamSpec, rank: int, num_ranks: int) -> tuple[int, int]:
    """The elements of the flattened parameter in ``rank``'s block; empty past the last row."""
    rows = spec.shape[0] if spec.shape else 1
    block = -(-rows // num_ranks) * (spec.numel // rows if rows else 0)
    return min(rank * block, spec.numel), min((rank + 1) * block, spec.numel)
