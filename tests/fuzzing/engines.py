"""Engines with their options and meshes, said in plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import HFSDP, HPZ, AnyEngine, build_engine, zero_in_groups
from shardlab.engines.precision import Precision

OURS = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")
ROWS = {  # over two axes, and what they do as users see it
    "hfsdp": "fsdp", "hpz": "fsdp", "zero_0x3": "zero3", "zero_1x3": "zero3", "zero_3x1": "zero3", "zero_3x3": "zero3",
    "zero_0x0": "zero1", "zero_1x1": "zero1", "zero_1x2": "zero2", "zero_2x1": "zero2",
}  # fmt: skip
LATE = ("hfsdp", "hpz", "zero_1x3", "zero_3x1")
"""Rows that are sharded at rest, of which other ranks see what was written into a piece only after a step."""
PEERS = ("torch_ddp", "torch_zero1", "torch_fsdp2")
PLACES = ("all", "first", "last", "halves")
"""Which ranks of the pool a mesh is on; 'halves': each of several equal parts of the pool has one."""
WITH_PARTITION = ("zero1", "zero2", "zero3")
NAMED: Mapping[str, Mapping[str, Any]] = {
    "wrap": {"every": lambda name, module: True},
    "precision": {
        # Buffers too: a float64 one would make activations float64, which no float32 layer takes.
        "float32": Precision(torch.float32, torch.float32, torch.float64, torch.float32),
        "float32, summed in float64": Precision(torch.float32, torch.float64, torch.float64, torch.float32),
        "summed in float32": Precision(reduce=torch.float32),
    },
}
"""Values of options that no plain value says, by name."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine."""

    name: str = "ddp"  # of the strategy
    options: tuple[tuple[str, Any], ...] = ()  # pairs of name and value; a name in ``NAMED`` stands for its value
    # pairs of axis and size; the axis 'tensor' is the last, all others are data ranks
    axes: tuple[tuple[str, int], ...] = (("data", 2),)
    transport: str = "shared_memory"  # 'shared_memory' or 'gloo'
    place: str = "all"  # of ``PLACES``
    guards: bool = True  # whether it has guards

    @property
    def kind(self) -> str:
        """The strategy that does the same as users see it: its own name, or that of which it is a row over two axes."""
        return ROWS.get(self.name, self.name)

    @property
    def gathers_late(self) -> bool:
        """Whether what a rank steps is gathered when the step has ended."""
        return self.kind in ("zero1", "zero2") or self.name in LATE

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def num_tensor_ranks(self) -> int:
        return dict(self.axes).get("tensor", 1)

    @property
    def num_data_ranks(self) -> int:
        """Ranks with rows of their own."""
        return self.num_ranks // self.num_tensor_ranks

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered between forward and backward, by the engine's own description."""
        return dict(self.options).get("sharding") in ("shard_grad_op", "no_shard")

    @property
    def has_replicas(self) -> bool:
        """Whether the shards are on several ranks each."""
        return "replica" in dict(self.axes)

    @property
    def gathers(self) -> bool:
        """Whether a forward gathers parameters from other ranks."""
        sharding, axes = dict(self.options).get("sharding"), dict(self.axes)
        size = self.num_data_ranks if self.name in ROWS else axes["shard" if sharding == "hybrid_shard" else "data"]
        return size > 1 and (self.kind == "zero3" or (self.kind == "fsdp" and sharding != "no_shard"))

    @property
    def rounds(self) -> bool:
        return "precision" in dict(self.options)

    def leaves_out(self, num_ranks: int) -> bool:
        """Whether some of a pool's ranks take no part."""
        return self.place != "halves" and self.num_ranks < num_ranks

    def ranks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The ranks of the mesh that a pool's rank is on, or of the others' where it is on none."""
        starts = {"last": num_ranks - self.num_ranks, "halves": rank - rank % self.num_ranks}
        start = starts.get(self.place, 0)
        return tuple(range(start, start + self.num_ranks))

    def build(self, model: nn.Module, optimizer_fn: Callable[..., torch.optim.Optimizer], mesh: Mesh) -> AnyEngine:
        options = {name: NAMED.get(name, {}).get(value, value) for name, value in self.options}
        mesh_or_none = None if self.name == "single" else mesh
        if self.name in ROWS:
            made = {"hfsdp": HFSDP, "hpz": HPZ}
            row = made[self.name] if self.name in made else partial(zero_in_groups, *map(int, self.name[5:].split("x")))
            return build_engine(row(**options), model, optimizer_fn, mesh, guards=self.guards)
        return build_engine(self.name, model, optimizer_fn, mesh_or_none, guards=self.guards, **options)
