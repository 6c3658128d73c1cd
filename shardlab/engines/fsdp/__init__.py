"""Fully sharded data parallel. Read ``units``, then unit, offloaded_engine, sharding, order, schedule, engine."""

from shardlab.engines.fsdp.engine import FSDP
from shardlab.engines.fsdp.sharding import LAYOUTS, SHARDINGS

__all__ = ["FSDP", "LAYOUTS", "SHARDINGS"]
