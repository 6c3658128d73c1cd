"""Which parameters are in which bucket, and where."""

from collections.abc import Mapping

from torch import nn

from shardlab.partition.buckets import plan_buckets
from shardlab.partition.chunks import ParamSpec
from shardlab.partition.flat import FlatLayout
from shardlab.vocabulary import Partition


def bucket_layouts(
    params: Mapping[str, nn.Parameter], num_ranks: int, bucket_bytes: int, partition: Partition
) -> tuple[FlatLayout, ...]:
    """Which parameters are in which bucket, and where; the same on every rank: only their order and sizes matter.

    Parameters that are frozen now get separate buckets, which cost nothing until they are unfrozen.

    Args:
        params: parameters by name, in the module's order.
        num_ranks: number of chunks of each bucket; 1 if nothing is sharded.
        bucket_bytes: bytes of a full bucket.
        partition: how a bucket's elements are divided over the ranks.

    Raises:
        ValueError: a capacity below 1.
    """
    specs = [ParamSpec(name, tuple(param.shape), param.element_size()) for name, param in params.items()]
    keys = [(param.dtype, param.device, param.requires_grad) for param in params.values()]
    return plan_buckets(specs, keys, num_ranks, bucket_bytes, partition)
