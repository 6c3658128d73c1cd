"""Ownership at the level of transformer blocks: whole blocks in runs, embedding, norm and head by size.

A model is not only its blocks: with a vocabulary of 50 k the embedding weighs as much as several of them, and a
placement that puts embedding, final norm and head on rank 0 by habit overfills that rank. Here the three are spread
first, largest first; then the blocks are cut into runs that even out the remaining imbalance. The measure is bytes, not
blocks. Sharded: everything, by whole blocks. Source of the greedy rule: see ``owners``.
"""

from dataclasses import dataclass

from shardlab.partition.chunks import require_count, require_rank
from shardlab.partition.owners import balanced_runs, fractions, largest_first, loads_by_rank


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of each transformer block, and of the parts around them. A head tied to the embedding has 0."""

    blocks: tuple[int, ...]
    embedding: int
    final_norm: int = 0
    head: int = 0

    def __post_init__(self) -> None:
        """No size may be negative."""
        for field, size in (
            ("blocks", min(self.blocks, default=0)),
            ("embedding", self.embedding),
            ("final_norm", self.final_norm),
            ("head", self.head),
        ):
            require_count(field, size, 0)

    @property
    def total(self) -> int:
        """Bytes of the whole model."""
        return sum(self.blocks) + self.embedding + self.final_norm + self.head


@dataclass(frozen=True)
class BlockPlacement:
    """Who holds which block: rank r has blocks ``bounds[r]`` to ``bounds[r + 1]``; each other part has one rank."""

    model: ModelBytes
    bounds: tuple[int, ...]
    embedding_rank: int
    final_norm_rank: int
    head_rank: int

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return len(self.bounds) - 1

    def blocks_of(self, rank: int) -> range:
        """Indices of the blocks of ``rank``; empty where it has none.

        Raises:
            ValueError: ``rank`` is not one of the ranks.
        """
        require_rank(rank, self.num_ranks)
        return range(self.bounds[rank], self.bounds[rank + 1])

    def owner_of_block(self, block: int) -> int:
        """Rank that holds ``block``.

        Raises:
            ValueError: there is no such block.
        """
        for rank in range(self.num_ranks):
            if block in self.blocks_of(rank):
                return rank
        raise ValueError(f"block: there is no block {block}; it must be 0 to {len(self.model.blocks) - 1}")

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Bytes that each rank holds: the memory of its shard."""
        extras = loads_by_rank(
            [self.model.embedding, self.model.final_norm, self.model.head],
            [self.embedding_rank, self.final_norm_rank, self.head_rank],
            self.num_ranks,
        )
        runs = (sum(self.model.blocks[block] for block in self.blocks_of(rank)) for rank in range(self.num_ranks))
        return tuple(extra + run for extra, run in zip(extras, runs, strict=True))

    @property
    def byte_fractions(self) -> tuple[float, ...]:
        """Fraction of the model's bytes (not of its blocks) that each rank holds."""
        return fractions(self.bytes_by_rank)

    def saving(self, rank: int) -> float:
        """Fraction of the replicated memory that ``rank`` does not hold.

        Raises:
            ValueError: ``rank`` is not one of the ranks.
        """
        require_rank(rank, self.num_ranks)
        return 1 - self.byte_fractions[rank] if self.model.total else 0.0


def place_blocks(model: ModelBytes, num_ranks: int) -> BlockPlacement:
    """Embedding, head and final norm spread by size, then the blocks in contiguous runs that even out the bytes.

    A head of 0 bytes is tied to the embedding and stays with it.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    require_count("num_ranks", num_ranks, 1)
    extras = [model.embedding, model.head, model.final_norm]
    embedding_rank, head_rank, norm_rank = largest_first(extras, [0] * num_ranks)
    if model.head == 0:
        head_rank = embedding_rank
    base = loads_by_rank(extras, [embedding_rank, head_rank, norm_rank], num_ranks)
    return BlockPlacement(model, balanced_runs(model.blocks, num_ranks, base), embedding_rank, norm_rank, head_rank)
