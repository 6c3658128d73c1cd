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

from shardlab.partition.chunks import Piece, require_count, require_rank
from shardlab.partition.flat import ParamSpec


@dataclass(frozen=True)
class Dim0Layout:
    """Parameters ``specs``, each cut along dim 0 into ``num_ranks`` blocks; read like a ``FlatLayout``.

    ``Piece.slot_index`` is the parameter's index in ``specs``; ``flat_start`` to ``flat_stop`` is its place in the
    gathered, padded, rank-major buffer. Padding is at the end of each chunk.
    """

    specs: tuple[ParamSpec, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        """There must be a rank."""
        require_count("num_ranks", self.num_ranks, 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in the given order."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of every rank's chunk, padding included: what rank 0 holds, which has a full block of everything."""
        return sum(stop - start for start, stop in (self._block(spec, 0) for spec in self.specs))

    @property
    def bounds(self) -> tuple[int, ...]:
        """The ``num_ranks + 1`` offsets of the chunks in the gathered buffer."""
        return tuple(rank * self.chunk_numel for rank in range(self.num_ranks + 1))

    @cached_property
    def numel(self) -> int:
        """Real elements, padding not counted."""
        return sum(spec.numel for spec in self.specs)

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_ranks * self.chunk_numel

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter, over all chunks."""
        return self.padded_numel - self.numel

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Elements of each rank's chunk, padding included: all equal."""
        return (self.chunk_numel,) * self.num_ranks

    def chunk(self, rank: int) -> tuple[int, int]:
        """First element of ``rank``'s chunk in the gathered buffer and one past its last.

        Raises:
            ValueError: ``rank`` is not one of the ranks.
        """
        require_rank(rank, self.num_ranks)
        return rank * self.chunk_numel, (rank + 1) * self.chunk_numel

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The rows that ``rank`` holds of each parameter, in the order of ``specs``, empty pieces left out.

        Raises:
            ValueError: ``rank`` is not one of the ranks.
        """
        require_rank(rank, self.num_ranks)
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(self._cut(rank)) for rank in range(self.num_ranks))

    def _cut(self, rank: int) -> list[Piece]:
        found = []
        place = rank * self.chunk_numel
        for index, spec in enumerate(self.specs):
            start, stop = self._block(spec, rank)
            if start < stop:
                whole = stop - start == spec.numel
                found.append(Piece(index, spec.name, place, place + stop - start, start, stop, whole))
            place += stop - start
        return found

    def _block(self, spec: ParamSpec, rank: int) -> tuple[int, int]:
        """The elements of the flattened parameter in ``rank``'s block; empty past the last row."""
        block = -(-_rows(spec) // self.num_ranks) * _row_numel(spec)
        return min(rank * block, spec.numel), min((rank + 1) * block, spec.numel)


def dim0_layout(specs: Sequence[ParamSpec], num_ranks: int) -> Dim0Layout:
    """Parameters in the given order, each cut into blocks of ceil(rows / num_ranks) rows, the last shorter or empty.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    return Dim0Layout(tuple(specs), num_ranks)


def _rows(spec: ParamSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _row_numel(spec: ParamSpec) -> int:
    return spec.numel // _rows(spec) if _rows(spec) else 0
