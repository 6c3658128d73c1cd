"""Buckets: which parameters' gradients travel in one message.

Backward makes the last parameters' gradients first, so buckets are filled in reverse order of the parameters and the
first bucket is full while most of backward is still to come (Li et al., arXiv 2006.15704, section 3.2.3). The bucket
map must be the same on every rank: it depends on the order of the parameters alone, never on the order of a set.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from shardlab.partition.chunks import ParamSpec, require_count
from shardlab.partition.flat import FlatLayout, aligned_first, flat_layout, owned_layout
from shardlab.partition.owners import owners_by_name
from shardlab.vocabulary import Partition

DEFAULT_BUCKET_BYTES = 25 * 1024**2  # of gradients, as torch's DistributedDataParallel has it


def assign_buckets(
    specs: Sequence[ParamSpec], bucket_bytes: int, keys: Sequence[Hashable] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Indices into ``specs``, bucket by bucket, in reverse order of ``specs`` within each bucket.

    A bucket is closed when the next parameter would take it past ``bucket_bytes``; a larger parameter is alone.
    With ``keys``, one bucket is open per key at a time, so that parameters of two dtypes that alternate still share
    buckets with their own kind. Buckets come in the order in which backward completes them.

    Args:
        specs: parameters in the order in which forward uses them.
        bucket_bytes: bytes of gradients in a full bucket, at least 1.
        keys: a hashable per parameter; parameters of different keys, say ``(dtype, trainable)``, never share a bucket.

    Returns:
        Every index exactly once; no empty bucket.

    Raises:
        ValueError: ``bucket_bytes`` is below 1.
    """
    require_count("bucket_bytes", bucket_bytes, 1)
    keys = (None,) * len(specs) if keys is None else keys
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for index in reversed(range(len(specs))):
        key, num_bytes = keys[index], specs[index].num_bytes
        if key not in open_buckets or open_bytes[key] + num_bytes > bucket_bytes:
            open_buckets[key], open_bytes[key] = [], 0
            # The same list, which goes on filling while its bucket is open.
            buckets.append(open_buckets[key])
        open_buckets[key].append(index)
        open_bytes[key] += num_bytes
    # Complete when its last gradient is there: the lowest index, since backward counts down.
    return tuple(sorted((tuple(bucket) for bucket in buckets), key=lambda bucket: -bucket[-1]))


def plan_buckets(
    specs: Sequence[ParamSpec], keys: Sequence[Hashable] | None, num_ranks: int, bucket_bytes: int,
    partition: Partition = Partition.ELEMENTS,
) -> tuple[FlatLayout, ...]:  # fmt: skip
    """The layout of every bucket, in the order in which backward completes them; names are in ``layout.specs``.

    Args:
        specs: parameters in the order in which forward uses them.
        keys: as for :func:`assign_buckets`.
        num_ranks: chunks of each bucket; 1 where nothing is sharded.
        bucket_bytes: bytes of gradients in a full bucket, at least 1.
        partition: ``elements`` cuts each bucket into equal chunks; the others give whole parameters to ranks,
            assigned over the whole model and not bucket by bucket.

    Raises:
        ValueError: a count is too small.
    """
    buckets = [aligned_first(specs[index] for index in bucket) for bucket in assign_buckets(specs, bucket_bytes, keys)]
    if partition == Partition.ELEMENTS:
        return tuple(flat_layout(bucket, num_ranks) for bucket in buckets)
    owners = owners_by_name(specs, num_ranks, partition)
    return tuple(owned_layout(bucket, [owners[spec.name] for spec in bucket], num_ranks) for bucket in buckets)


def bucket_layouts(
    params: Mapping[str, Any], num_ranks: int, bucket_bytes: int, partition: Partition
) -> tuple[FlatLayout, ...]:
    """The layouts of the buckets of parameters; the same on every rank: only their order and sizes matter.

    Parameters that are frozen now get separate buckets, which cost nothing until they are unfrozen.

    Args:
        params: of torch, by name, in the module's order.
        num_ranks: number of chunks of each bucket; 1 if nothing is sharded.
        bucket_bytes: bytes of a full bucket.
        partition: how a bucket's elements are divided over the ranks.

    Raises:
        ValueError: a capacity below 1.
    """
    specs = [ParamSpec(name, tuple(param.shape), param.element_size()) for name, param in params.items()]
    keys = [(param.dtype, param.device, param.requires_grad) for param in params.values()]
    return plan_buckets(specs, keys, num_ranks, bucket_bytes, partition)
