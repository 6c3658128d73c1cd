"""Fully sharded data parallel. Read sharding, policy, bucket, unit, build, order, schedule, engine."""

from shardlab.engines.fsdp.engine import FSDP
from shardlab.engines.fsdp.policy import NAMED_POLICIES, parse_wrap, wrapped_modules
from shardlab.engines.fsdp.sharding import LAYOUTS, SHARDINGS

__all__ = ["FSDP", "LAYOUTS", "NAMED_POLICIES", "SHARDINGS", "parse_wrap", "wrapped_modules"]
