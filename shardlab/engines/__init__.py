"""The strategies.

Read them in this order: backward_watch, base, single, ddp, buckets, reduction_queue, bucketed, shards, optimizer_fit,
zero1, zero2, sharded_unit, saved, zero3, sharded_linear, fsdp.
"""

from shardlab.engines import checkpoint
from shardlab.engines.accounting import ShardRow
from shardlab.engines.base import Engine, OptimizerFn
from shardlab.engines.bucketed import Bucketed
from shardlab.engines.ddp import DDP
from shardlab.engines.fsdp import FSDP
from shardlab.engines.grad_scaler import GradScaler
from shardlab.engines.precision import Precision
from shardlab.engines.registry import STRATEGIES, build_engine, engine_options
from shardlab.engines.sharded_optimizer import ShardedOptimizer
from shardlab.engines.single import Single
from shardlab.engines.state import EngineState
from shardlab.engines.step_tensors import StepTensors
from shardlab.engines.zero1 import ZeRO1
from shardlab.engines.zero2 import ZeRO2
from shardlab.engines.zero3 import ZeRO3

# Handed in, not imported by the engines, so that training code does not depend on checkpoints; and here, since this
# file runs whatever is imported from the package.
EngineState.checkpointer = checkpoint

__all__ = [
    "DDP",
    "FSDP",
    "STRATEGIES",
    "Bucketed",
    "Engine",
    "GradScaler",
    "OptimizerFn",
    "Precision",
    "ShardRow",
    "ShardedOptimizer",
    "Single",
    "StepTensors",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "build_engine",
    "engine_options",
]
