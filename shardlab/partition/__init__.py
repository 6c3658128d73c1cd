"""Who holds what: pure arithmetic of shards, buckets, owners, wire bytes and time. Standard library only."""

from shardlab.partition.buckets import assign_buckets
from shardlab.partition.chunks import ParamSpec, even_bounds
from shardlab.partition.flat import flat_layout, owned_layout
from shardlab.partition.owners import assign_owners
from shardlab.partition.ring_cost import Link, ring_wire_bytes
from shardlab.partition.uneven import chunk_bounds, chunk_sizes

__all__ = [
    "Link", "ParamSpec", "assign_buckets", "assign_owners", "chunk_bounds", "chunk_sizes", "even_bounds",
    "flat_layout", "owned_layout", "ring_wire_bytes",
]  # fmt: skip
