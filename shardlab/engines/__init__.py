"""The strategies. Read them in this order: base, single, ddp, buckets, bucketed, shards, zero1."""

from shardlab.engines.base import Engine, OptimizerFn, ShardRow
from shardlab.engines.bucketed import Bucketed
from shardlab.engines.ddp import DDP
from shardlab.engines.registry import STRATEGIES, build_engine, engine_options
from shardlab.engines.sharded_optimizer import ShardedOptimizer
from shardlab.engines.single import Single
from shardlab.engines.step_tensors import StepTensors
from shardlab.engines.zero1 import ZeRO1

__all__ = [
    "DDP",
    "STRATEGIES",
    "Bucketed",
    "Engine",
    "OptimizerFn",
    "ShardRow",
    "ShardedOptimizer",
    "Single",
    "StepTensors",
    "ZeRO1",
    "build_engine",
    "engine_options",
]
