"""Bytes at rest for any model, strategy and number of ranks: the planner's tables, ready for comparison.

plan = MemoryPlan(model="gpt-30m", ranks=8, precision="mixed")
plan.by_strategy()        # table memory, one run per strategy
plan.by_ranks("zero2")    # table memory, one run per number of ranks
plan.costs()              # bytes, saving and bytes sent per strategy
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
import torch
from torch import nn

from shardlab import planner
from shardlab.experiment import Workload
from shardlab.models import MODELS, build_model
from shardlab.partition.chunks import ParamSpec, require_count
from shardlab.planner.rows import ROWS, row_of
from shardlab.plots.text import byte_scale
from shardlab.records.tables import MEMORY
from shardlab.units import units_of
from shardlab.vocabulary import Sharding, class_of

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
OPTIMIZERS = {"adamw": planner.ADAM, "sgd with momentum": planner.SGD_MOMENTUM, "sgd": planner.SGD}
MAX_PARAMS = 1e14
MAX_RANKS = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """A model and a setup to plan.

    Attributes:
        model: a name from ``models.MODELS``, a number of parameters, for example 7.5e9, or a model of your own: a
            ``Workload``, or a module, for which the meta device will do.
        ranks: number of ranks.
        precision: 'fp32', 'mixed' as in the ZeRO paper (16-bit parameters and gradients, fp32 master weights),
            'mixed-8bit' or 'pure-bf16'.
        optimizer: 'adamw', 'sgd with momentum' or 'sgd'.
        sharding: of FSDP: full_shard, shard_grad_op, no_shard or hybrid_shard.
        shard_group: ranks in a shard group of hybrid_shard; None for the largest divisor below ``ranks``.

    Raises:
        ValueError: a field has an invalid value; the message names the field and the allowed values.
    """

    model: str | float | nn.Module | Workload = "gpt-30m"
    ranks: int = 8
    precision: str = "fp32"
    optimizer: str = "adamw"
    sharding: str = Sharding.FULL_SHARD
    shard_group: int | None = None

    def __post_init__(self) -> None:
        """Check every field, and describe the model."""
        require_count("ranks", self.ranks, 1)
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks: {self.ranks} is above {MAX_RANKS}")
        known: dict[str, Collection[str]] = {"precision": planner.PRECISIONS, "optimizer": OPTIMIZERS}
        for name, allowed in (known | {"sharding": tuple(Sharding)}).items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.group < 1 or self.ranks % self.group:
            raise ValueError(f"shard_group: {self.group} is given; it must divide the {self.ranks} ranks")
        self._setup("fsdp")

    @cached_property
    def _described(self) -> tuple[planner.PlannedModel, dict[str, list[str]]]:
        """The planner's model and the parameters of each unit, for a module or a single tensor of so many elements."""
        model = self.model
        if isinstance(model, Workload):
            module = model.on_meta()
            return planner.described(module), units_of(module, model.wrap)
        if isinstance(model, str):
            with torch.device("meta"):
                model = build_model(model)
        if isinstance(model, nn.Module):
            return planner.described(model), units_of(model)
        if not isinstance(model, int | float):
            raise ValueError(
                f"model: {class_of(model)} was given; give a module, a Workload, a number of parameters, or one of "
                f"{', '.join(MODELS)}"
            )
        if not 1 <= model <= MAX_PARAMS or model != int(model):
            raise ValueError(
                f"model: {model:g} is not a whole number from 1 to {MAX_PARAMS:g}, nor one of {', '.join(MODELS)}"
            )
        return planner.PlannedModel.of_specs([ParamSpec("parameters", (int(model),), 4)]), {}

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self._described[0].numel

    @property
    def group(self) -> int:
        """Ranks in a shard group of hybrid_shard."""
        if self.shard_group is not None:
            return self.shard_group
        return next((size for size in range(self.ranks // 2, 0, -1) if self.ranks % size == 0), 1)

    def by_strategy(self) -> pd.DataFrame:
        """Table ``memory``, predicted: bytes of rank 0 under each strategy. No rank holds more than rank 0."""
        return self._memory({name: self._setup(name) for name in STRATEGIES})

    def by_ranks(self, strategy: str) -> pd.DataFrame:
        """Table ``memory``, predicted, for one strategy on 1, 2, 4, ... ranks up to ``ranks``; ``run`` is the number.

        Raises:
            ValueError: the strategy is unknown.
        """
        sizes = [*(2**power for power in range(self.ranks.bit_length()) if 2**power < self.ranks), self.ranks]
        # A shard group that does not fit becomes all ranks.
        setups = [self._setup(strategy, size, self.group if size % self.group == 0 else size) for size in sizes]
        names = ["1 rank" if size == 1 else f"{size:,} ranks" for size in sizes]
        return self._memory(dict(zip(names, setups, strict=True)))

    def costs(self) -> pd.DataFrame:
        """One row per strategy: bytes at rest by role, saving against ddp, and bytes that rank 0 sends in a step."""
        memory = self.by_strategy()
        held = memory.pivot_table(index="run", columns="role", values="bytes", aggfunc="sum", sort=False)
        held = held.astype("float64")
        total, state = held.sum(axis=1), held["optimizer_state"] + held["master_weight"]
        divisor, unit = byte_scale(float(total.max()))
        sent = [planner.sent_bytes(self._described[0], self._setup(str(name))) / divisor for name in held.index]
        table = pd.DataFrame({
            "strategy": held.index, f"parameters ({unit})": held["parameter"] / divisor,
            f"gradients ({unit})": held["gradient"] / divisor, f"optimizer ({unit})": state / divisor,
            f"total ({unit})": total / divisor, "saving (%)": 100 * (1 - total / total["ddp"]),
            f"sent ({unit}/step)": sent,
        })  # fmt: skip
        return table.reset_index(drop=True)

    def _memory(self, setups: dict[str, planner.Setup]) -> pd.DataFrame:
        tables = [
            planner.predicted_memory(self._described[0], setup, ranks=[0], run=run) for run, setup in setups.items()
        ]
        return MEMORY.frame(pd.concat(tables, ignore_index=True))

    def _setup(self, strategy: str, ranks: int | None = None, group: int | None = None) -> planner.Setup:
        hybrid = strategy in ROWS and row_of(strategy, self.sharding).outer is not None
        return planner.Setup(
            strategy, ranks or self.ranks, units=self._described[1], sharding=self.sharding,
            shard_group_size=(group or self.group) if hybrid else None, optimizer=OPTIMIZERS[self.optimizer],
            precision=planner.PRECISIONS["mixed"] if self.precision == "mixed" else None,
        )  # fmt: skip
