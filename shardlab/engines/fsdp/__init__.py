"""Fully sharded data parallel. Read ``units``, then bucket, sharding, unit, build, order, schedule, engine."""

from shardlab.engines.fsdp.engine import FSDP
from shardlab.engines.fsdp.sharding import LAYOUTS, SHARDINGS

__all__ = ["FSDP", "LAYOUTS", "SHARDINGS"]
