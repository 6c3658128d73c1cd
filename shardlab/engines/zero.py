"""What the three stages of ZeRO have in common: their options, and one ``Shards`` for each bucket.

What a stage divides is in its own file; how a bucket is divided, and when it travels, in ``sharded_params.py``.
"""

from shardlab.comm.communicator import Communicator
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.sharded_params import ByAddress, Placements, Shards
from shardlab.engines.strategy import Given, Strategy
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES, bucket_layouts
from shardlab.partition.chunks import parse_partition
from shardlab.vocabulary import Partition


class ZeRO(Strategy):
    """Optimizer state is sharded, bucket by bucket.

    Args:
        bucket_bytes: capacity of a bucket in bytes; its parameters travel in one message.
        partition: 'elements', or whole parameters by 'round_robin', 'contiguous', 'balanced'.
        precision: 'full', 'bf16', 'fp16' or a ``Precision``. The optimizer steps master weights. Inside ``no_sync()``
            gradients add up in the dtype they are reduced in where parameters are whole, unless they are computed in
            one with more bits; where parameters are sharded, in the compute dtype.
    """

    means_over: int | None = None
    """See ``Placements``; 0: means stay in the buffer, each rank's in its own chunk."""

    def __init__(
        self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, partition: Partition | str = Partition.ELEMENTS, precision:
        Precision | str = "full",
    ) -> None:  # fmt: skip
        self.bucket_bytes = bucket_bytes
        self.partition, self.precision = parse_partition(partition), parse_precision(precision)

    def divide(self, given: Given) -> tuple[Communicator, Placements]:
        """Over which ranks, and how; a strategy of two axes has one of its own: this one divides over the last alone.

        ``ZeRO1`` adds that its parameters are whole at rest.
        """
        return self.comm, Placements(self.precision, means_over=self.means_over)

    def make_shards(self, comm: Communicator, placements: Placements, at: ByAddress | None = None) -> list[Shards]:
        """One for each bucket, in the order in which backward completes them."""
        layouts = bucket_layouts(self.params, comm.num_ranks, self.bucket_bytes, self.partition)
        return [Shards(f"bucket {index}", self.params, one, comm, placements, at) for index, one in enumerate(layouts)]
