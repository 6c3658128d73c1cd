"""What stands beside an optimizer: its state sharded over ranks without an engine, and loss scaling for float16."""

from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["GradScaler", "ShardedOptimizer"]
