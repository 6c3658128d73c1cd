"""Who holds what: pure arithmetic of shards, buckets, owners and wire bytes. Standard library only."""

from shardlab.partition.blocks import BlockPlacement, ModelBytes, place_blocks
from shardlab.partition.buckets import assign_buckets
from shardlab.partition.chunks import (
    Layout,
    Piece,
    chunk_bounds,
    chunk_sizes,
    even_bounds,
    owner_of,
    saving,
    shard_bytes,
)
from shardlab.partition.flat import FlatLayout, ParamSpec, Slot, flat_layout, owned_layout, owned_order
from shardlab.partition.owners import Ownership, assign_owners
from shardlab.partition.ring_cost import Link, ring_wire_bytes

__all__ = [
    "BlockPlacement",
    "FlatLayout",
    "Layout",
    "Link",
    "ModelBytes",
    "Ownership",
    "ParamSpec",
    "Piece",
    "Slot",
    "assign_buckets",
    "assign_owners",
    "chunk_bounds",
    "chunk_sizes",
    "even_bounds",
    "flat_layout",
    "owned_layout",
    "owned_order",
    "owner_of",
    "place_blocks",
    "ring_wire_bytes",
    "saving",
    "shard_bytes",
]
