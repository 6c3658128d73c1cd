"""Engines with their options and meshes, and optimizers, said in plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, build_engine

OURS = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")
PEERS = ("torch_ddp", "torch_zero1", "torch_fsdp2")
WRAPS = {"every": lambda name, module: True}
"""Wrap policies that no plain value says."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine.

    Attributes:
        name: of the strategy.
        options: pairs of name and value; a name of ``WRAPS`` stands for its function.
        axes: pairs of axis and size, all data ranks.
        transport: 'shared_memory' or 'gloo'.
    """

    name: str = "ddp"
    options: tuple[tuple[str, Any], ...] = ()
    axes: tuple[tuple[str, int], ...] = (("data", 2),)
    transport: str = "shared_memory"

    @property
    def num_ranks(self) -> int:
        """Ranks of its mesh."""
        return prod(size for _, size in self.axes)

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered between forward and backward, by the engine's own description."""
        return dict(self.options).get("sharding") == "shard_grad_op"

    def build(self, model: nn.Module, optimizer_fn: Callable[..., torch.optim.Optimizer], mesh: Mesh) -> Engine:
        """The engine around ``model``."""
        options = dict(self.options)
        if options.get("wrap") in WRAPS:
            options["wrap"] = WRAPS[options["wrap"]]
        return build_engine(self.name, model, optimizer_fn, None if self.name == "single" else mesh, **options)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that forgives neither a gradient off by a factor nor one that is 0 instead of None.

    Attributes:
        kind: 'sgd' (with momentum and weight decay), 'adam' or 'adamw' (with a large eps).
        groups: biases have a group of their own.
        left_out: the last layer's bias is in no group, until ``AddGroup``.
    """

    kind: str = "sgd"
    groups: bool = False
    left_out: bool = False

    def build(self, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """The optimizer over these tensors, known by their names in the module."""
        named = [(name, tensor) for name, tensor in named if not (self.left_out and name == LEFT_OUT)]
        if not self.groups:
            return self._over([{"params": [tensor for _, tensor in named]}])
        biases = [tensor for name, tensor in named if name.endswith("bias")]
        others = [tensor for name, tensor in named if not name.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
        return self._over([group for group in groups if group["params"]])

    def _over(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)
        kind = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        return kind(groups, lr=0.05, eps=0.1, weight_decay=0.1)


LEFT_OUT = "leave.bias"
