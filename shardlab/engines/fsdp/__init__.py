"""Fully sharded data parallel. Read policy, group, order, engine."""

from shardlab.engines.fsdp.engine import FSDP, LAYOUTS, SHARDINGS
from shardlab.engines.fsdp.policy import NAMED_POLICIES, parse_wrap, wrapped_modules

__all__ = ["FSDP", "LAYOUTS", "NAMED_POLICIES", "SHARDINGS", "parse_wrap", "wrapped_modules"]
