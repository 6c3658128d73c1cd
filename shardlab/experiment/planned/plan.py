"""What each strategy will cost a workload, without ranks.

    plan(workload, ranks=8)                               # one row per strategy
    plan(workload, ranks=64, strategies="fsdp", precision="bf16", prefetch=2)

Bytes at rest of our strategies are arithmetic, and so a count of their own; of a strategy of the reader's own, and all
messages, they are those of the engine itself, which takes two steps without values (``dry_step``). The model
is built on the meta device where that is possible: one of 7 billion parameters needs neither time nor memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from shardlab import planner
from shardlab.analysis.held_bytes import by_column
from shardlab.dry.messages import DryRun
from shardlab.engines import Strategy
from shardlab.engines.precision import parse_precision
from shardlab.experiment.config import CompareConfig, takes, takes_buckets
from shardlab.experiment.planned.dry_run import Held, KnownShapes, dry_step, memory_of
from shardlab.experiment.planned.known_workload import PlannedWorkload, divided_module
from shardlab.experiment.trained.workload import Workload
from shardlab.launch import place
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.planner import Setup
from shardlab.planner.memory import on_tensor_ranks
from shardlab.planner.setup import STRATEGIES, Optimizer
from shardlab.records.tables import MEMORY
from shardlab.units import units_of
from shardlab.vocabulary import Collective, dtype_name

BY_ROWS = "what is used or sent depends on the rows, so bytes and messages may differ from the plan's"
_BY_OPTIMIZER = "the optimizer's state has other shapes than the parameters, or grows after its first step"
_PEERS = "it is torch's own"
REFUSED = ("strategy: ", "model: ")
"""With which the errors begin that an engine raises of its class or of the model, with values and without."""


@dataclass(frozen=True)
class Plan:
    """Tables ``memory`` and ``collectives`` of one step, ``source='predicted'``.

    Attributes:
        memory: at rest; where rows choose which parameters are used, of ranks whose rows have used all.
        collectives: None where they are not known, see ``why``.
        gathered_bytes: the most gathered parameters that a rank has at one moment; None likewise.
        precision: 'full' of a strategy that takes none.
        by_rows: whether rows choose which parameters are used.
        is_own: whether the strategy is the reader's own, whose messages may differ from step to step.
        why: why messages are not known: rows choose which units are called, or a step cannot be run without values.
    """

    memory: pd.DataFrame
    collectives: pd.DataFrame | None
    gathered_bytes: int | None
    precision: str
    by_rows: bool = False
    is_own: bool = False
    why: str = ""

    def heaviest_ranks(self, num_places: int = 1) -> list[int]:
        """The first of those that hold most at rest, of each place in the pipeline."""
        of_place = np.array_split(self.memory.groupby("rank")["bytes"].sum().to_numpy(), num_places)
        return [place * len(held) + int(held.argmax()) for place, held in enumerate(of_place)]


def plan_runs(config: CompareConfig, told: Callable[[str], object] = str) -> dict[str, Plan | str]:
    """The plan of each strategy, whose name is ``told`` when it is there; or why not even what is at rest is known.

    That is so of torch's own strategies, of optimizers whose state is not made of counters and of tensors of the
    parameter's shape or grows after the first step, and of a strategy of the reader's own whose step cannot be run
    without values.

    Raises:
        ValueError: the optimizer raises an error where its state is planned, or the data's first batch cannot be read.
        Exception: whatever the data raises later, if layers are divided.
    """
    if not any(map(config.strategy, config.strategies)):
        return dict.fromkeys(config.strategies, _PEERS)
    plans, found = _Plans(config), dict[str, Plan | str]()
    for name in config.strategies:
        found[name] = plans.of(name)
        told(name)
    return found


def plans_or_why(config: CompareConfig) -> dict[str, Plan | str]:
    """What ``plan_runs`` returns, or the error that it raises, of each strategy: what has run is not lost by it."""
    try:
        return plan_runs(config)
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"planning raised {type(error).__name__}: {error}"
        return dict.fromkeys(config.strategies, said)


class _Plans:
    """What the plans of all strategies share."""

    def __init__(self, config: CompareConfig) -> None:
        self._config, self._known = config, PlannedWorkload.of(config)
        self._divided = None if config.tp == 1 else divided_module(config, self._known.module)
        self._shapes: KnownShapes = {}

    def of(self, strategy: str) -> Plan | str:
        config, known, made = self._config, self._known, self._config.strategy(strategy)
        if made is None:
            return _PEERS
        if known.optimizer is None:
            return _BY_OPTIMIZER
        (run, why), is_own = self._run(strategy, made), config.inside(strategy) in config.own_strategies
        if run is None and (is_own or why.startswith(REFUSED)):
            return why
        memory = self._at_rest(strategy, known.optimizer) if run is None or not is_own else memory_of(run, strategy)
        sent = None if run is None else run.messages(run=strategy)
        gathered = None if run is None else run.of_rank(0)[1].gathered_bytes
        return Plan(memory, sent, gathered, config.precision_of(strategy), known.forward.by_rows, is_own, why)

    def _at_rest(self, strategy: str, optimizer: Mapping[str, Optimizer]) -> pd.DataFrame:
        config, module = self._config, self._known.module
        if (staged := config.staged_of(strategy)) is not None:
            modules = [staged.module_of(module, place) for place in range(config.pipe)]
            return _of_stages(strategy, [self._of_module(strategy, one, optimizer) for one in modules])
        if self._divided is not None and config.divides(strategy):
            module = self._divided
        return self._of_module(strategy, module, optimizer)

    def _of_module(self, strategy: str, module: nn.Module, optimizer: Mapping[str, Optimizer]) -> pd.DataFrame:
        config = self._config
        own = {name for name, _ in module.named_parameters()}
        model = planner.described(module, unused=[name for name in self._known.forward.unused if name in own])
        memory = planner.predicted_memory(model, setup_of(config, strategy, module, optimizer))
        return on_tensor_ranks(memory, config.tp) if config.divides(strategy) else memory

    def _run(self, strategy: str, made: Strategy) -> tuple[DryRun[Held] | None, str]:
        """The step without values; or why there is none."""
        config, forward = self._config, self._known.forward
        decide_on_units = forward.by_rows and forward.called is None
        if decide_on_units and made.by_unit and prod(config.mesh_axes(strategy).values()) > 1:
            return None, BY_ROWS
        try:
            return dry_step(config, strategy, self._known, self._shapes), ""
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith(REFUSED):
                return None, str(error)
            return None, f"its step cannot be run without values: {type(error).__name__}: {error}"


def _of_stages(run: str, of_place: list[pd.DataFrame]) -> pd.DataFrame:
    """What all ranks hold, from what the data ranks of each place in the pipeline do."""
    size = max(int(one["rank"].max()) + 1 for one in of_place)
    ranked = [one.assign(rank=one["rank"] + place * size, run=run) for place, one in enumerate(of_place)]
    return MEMORY.frame(pd.concat(ranked, ignore_index=True))


def setup_of(config: CompareConfig, strategy: str, module: nn.Module, optimizer: Mapping[str, Optimizer]) -> Setup:
    """The planner's description of a strategy as ``compare`` runs it.

    Args:
        config: the options.
        strategy: a name.
        module: whose structure gives the units.
        optimizer: what it keeps, by parameter.
    """
    strategy, precision = config.inside(strategy), parse_precision(config.precision)
    if place(config.ranks, config.device).device_type == "cuda":
        # Torch keeps them in host memory.
        optimizer = {name: _without_counters(kept) for name, kept in optimizer.items()}
    # What a strategy does not take of all this is ignored.
    return Setup(
        strategy, 1 if config.is_alone(strategy) else config.data_ranks, bucket_bytes=config.bucket_bytes,
        partition=config.partition, units=units_of(module, config.wrap_policy), layout=config.layout,
        sharding=config.sharding, replicate_below=config.replicate_below, offload=config.offload,
        shard_group_size=config.shards if config.has_two_axes(strategy) else None,
        prefetch=config.prefetch, micro_batches=config.accumulation, clip=config.clip is not None,
        scales_loss=config.scales_loss(strategy), broadcast_buffers=config.broadcast_buffers, optimizer=optimizer,
        compute_dtype=_name(precision.compute), reduce_dtype=_name(precision.reduce_dtype),
    )  # fmt: skip


def _without_counters(kept: Optimizer) -> Optimizer:
    return replace(kept, counter_bytes=0, from_start=kept.from_start and _without_counters(kept.from_start))


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def plan(
    workload: Workload | str,
    ranks: int,
    strategies: Sequence[str | Strategy] | str | Strategy = STRATEGIES,
    **options: Any,
) -> pd.DataFrame:
    """One row per strategy: maxima over ranks of bytes at rest by role, of bytes sent and of messages in a step.

    Args:
        workload: what is trained, or the place of it, FILE.py:NAME.
        ranks: number of ranks; they need not fit on this machine.
        strategies: names of ours, or strategies of your own; those of torch are not planned.
        options: other fields of ``CompareConfig``; buckets have the engines' 25 MiB unless ``bucket_mib`` is given.

    Returns:
        Sizes in bytes; where messages are not known (see ``Plan``) they and the bytes sent are missing. With a
        ``precision`` it has a column of that name: 'full' for strategies that take none. Where a strategy sends over
        several axes, a column for each: ``replica_wire_bytes``, missing of strategies that send over one.

    Raises:
        ValueError: an option has an invalid value, a strategy cannot be planned, or the data's first batch cannot be
            read here.
    """
    plans = plan_all(to_plan(workload, ranks, strategies, **options))
    return table_of([row_of(strategy, found) for strategy, found in plans.items()])


def plan_all(config: CompareConfig, told: Callable[[str], object] = str) -> dict[str, Plan]:
    """The tables behind ``plan``, by strategy, with its errors; ``told`` is that of ``plan_runs``."""
    return {strategy: _planned(strategy, found) for strategy, found in plan_runs(config, told).items()}


def to_plan(
    workload: Workload | str, ranks: int, strategies: Sequence[str | Strategy] | str | Strategy, **options: Any
) -> CompareConfig:
    """A step of it, with the engines' buckets."""
    chosen: Any = (strategies,) if isinstance(strategies, str | Strategy) else tuple(strategies)
    if any(takes_buckets(one) or takes("bucket_bytes")(one) for one in chosen):  # else the option would be refused
        options = {"bucket_mib": DEFAULT_BUCKET_BYTES / 2**20, **options}
    return CompareConfig(workload=workload, ranks=ranks, strategies=chosen, **{"steps": 1, **options})


def _planned(strategy: str, planned: Plan | str) -> Plan:
    if isinstance(planned, str):
        if planned.startswith(REFUSED):
            raise ValueError(planned)
        raise ValueError(f"strategies: {strategy!r} cannot be planned here: {planned}")
    return planned


def row_of(strategy: str, planned: Plan) -> dict[str, Any]:
    """A row of ``plan``'s table."""
    at_rest, sent = by_column(planned.memory, ["rank"]), planned.collectives
    sent = None if sent is None else sent[sent["op"] != str(Collective.RECV)]
    held: dict[Any, int] = at_rest.drop(columns="other_bytes").max().to_dict()
    num_bytes, messages, by_axis = (None, None, {}) if sent is None else (0.0, 0, {})
    if sent is not None and len(sent):
        by_rank = sent.groupby("rank")
        num_bytes, messages = float(by_rank["wire_bytes"].sum().max()), int(by_rank.size().max())
        by_axis = sent.groupby(["axis", "rank"])["wire_bytes"].sum().groupby("axis").max().to_dict()
    return {
        "strategy": strategy, "precision": planned.precision, **held, "rest_bytes": int(at_rest.sum(axis=1).max()),
        "wire_bytes_per_step": num_bytes, "messages_per_step": messages,
        **({f"{axis}_wire_bytes": size for axis, size in by_axis.items()} if len(by_axis) > 1 else {}),
    }  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows as a table of numbers, some of which may be missing; without ``precision`` where it is full in all."""
    table = pd.DataFrame(rows).astype({"wire_bytes_per_step": float, "messages_per_step": "Int64"})
    return table.drop(columns="precision") if (table["precision"] == "full").all() else table
