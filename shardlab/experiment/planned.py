"""What each strategy will cost a workload, without running it, and whether a record agrees in every byte and message.

    plan(workload, ranks=8)                               # one row per strategy
    plan(workload, ranks=64, strategies="fsdp", precision="bf16", prefetch=2)

The planner uses only the partition arithmetic and runs nothing, so plan and record are two independent counts. The
model is built on the meta device where that is possible: one of 7 billion parameters needs neither time nor memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from shardlab import planner
from shardlab.engines import engine_options
from shardlab.engines.precision import parse_precision
from shardlab.experiment.config import CompareConfig, takes
from shardlab.experiment.planned_workload import FirstForward, PlannedTensorAxis, PlannedWorkload
from shardlab.experiment.workload import Workload
from shardlab.launch import place
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.planner import PlannedModel, Setup
from shardlab.planner.setup import STRATEGIES, Optimizer
from shardlab.planner.tensor import on_tensor_ranks
from shardlab.trace.store import Records
from shardlab.units import units_of
from shardlab.vocabulary import MeshAxis, Phase, Role, dtype_name

_BY_ROWS = "what is used or sent depends on the rows, so bytes and messages may differ from the plan's"
MESSAGE = ["op", "axis", "tag", "dtype", "numel", "bytes", "wire_bytes", "group_size"]


@dataclass(frozen=True)
class Plan:
    """Tables ``memory`` and ``collectives`` of one step, ``source='predicted'``.

    ``collectives`` has the messages of each axis in order. How those of the tensor axis interleave with those of the
    data axes is not planned.

    Attributes:
        memory: at rest; where rows choose which parameters are used, of ranks whose rows have used all.
        collectives: None where they depend on the rows: of FSDP, if rows choose which units are called, and of divided
            layers, if what they send depends on values; and where the loss takes the mesh, and sends too.
        gathered_bytes: the most gathered parameters that a rank has at one moment.
        precision: 'full' of a strategy that takes none.
        by_rows: whether rows choose which parameters are used.
    """

    memory: pd.DataFrame
    collectives: pd.DataFrame | None
    gathered_bytes: int
    precision: str
    by_rows: bool = False

    @property
    def heaviest_rank(self) -> int:
        """The first of those that hold most at rest."""
        return int(self.memory.groupby("rank")["bytes"].sum().to_numpy().argmax())


def plan_runs(config: CompareConfig) -> dict[str, Plan | None]:
    """The plan of each strategy; None where the planner knows too little.

    Of nested FSDP units it does not know the order of messages, see ``Setup.nested_unit``.

    It knows nothing of torch's own strategies, of optimizers whose state is not made of counters and of tensors of the
    parameter's shape or grows after the first step, of the messages of ZeRO-3 where the loss calls the model not
    exactly once, and of those of FSDP where a unit is called more than once, in forward or again by a reentrant
    checkpoint in backward, or where one is frozen and no forward could be tried to see whether backward reaches it.

    Raises:
        ValueError: the optimizer raises an error where its state is planned, or the data's first batch cannot be read.
        Exception: whatever the data raises later, if layers are divided.
    """
    if set(STRATEGIES).isdisjoint(config.strategies):
        return dict.fromkeys(config.strategies)
    known = PlannedWorkload.of(config)
    axis = None if config.tp == 1 else PlannedTensorAxis(config, known.module)
    return {strategy: _plan_run(config, strategy, known, axis) for strategy in config.strategies}


def plans_or_why(config: CompareConfig) -> tuple[dict[str, Plan | None], str | None]:
    """What ``plan_runs`` returns; None of each strategy, with the reason, if planning raises an error.

    So what has run, or is shown, is not lost by it.
    """
    try:
        return plan_runs(config), None
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"planning raised {type(error).__name__}: {error}"
        return dict.fromkeys(config.strategies), said


def _plan_run(
    config: CompareConfig, strategy: str, known: PlannedWorkload, axis: PlannedTensorAxis | None
) -> Plan | None:
    if strategy not in STRATEGIES or known.optimizer is None or not _gathers_once(strategy, known.forward):
        return None
    module, model, over_tensor = known.module, known.model, None
    is_divided = axis is not None and strategy != "single"
    if axis is not None and is_divided:
        module, model = axis.module, planner.described(axis.module, unused=known.forward.unused)
        over_tensor = axis.collectives(strategy)
    setup = setup_of(config, strategy, module, known.optimizer, known.forward)
    if not _order_is_known(setup, known):
        return None
    memory, sent = planner.predicted_memory(model, setup), _sent(model, setup, known.forward)
    if config.trained.takes_mesh and setup.num_ranks > 1:
        sent = None
    if is_divided:
        memory = on_tensor_ranks(memory, config.tp)
        # The norm, on both axes, comes last.
        over_both = [] if over_tensor is None or sent is None else [over_tensor, on_tensor_ranks(sent, config.tp)]
        sent = pd.concat(over_both) if over_both else None
    gathered = planner.gathered_at_once(model, setup)
    return Plan(memory, sent, gathered, config.precision_of(strategy), by_rows=known.forward.by_rows)


def _sent(model: PlannedModel, setup: Setup, forward: FirstForward) -> pd.DataFrame | None:
    """The messages over the data axes; None if rows choose which units FSDP gathers."""
    if setup.strategy == "fsdp" and setup.num_ranks > 1 and forward.by_rows and forward.units is None:
        return None
    return planner.predicted_collectives(model, setup)


def _gathers_once(strategy: str, forward: FirstForward) -> bool:
    """Whether each gather around a forward is sent once, as far as is known."""
    if strategy == "zero3":
        return forward.calls in (None, 1)
    called = forward.units
    return strategy != "fsdp" or called is None or len(set(called)) == len(called)


def _order_is_known(setup: Setup, known: PlannedWorkload) -> bool:
    """Whether it is known which units FSDP gathers in which order."""
    if not setup.gathers_again or setup.num_shards == 1 or known.forward.units is not None:
        return setup.nested_unit is None
    trainable = {param.spec.name for param in known.model.params if param.trainable}
    return setup.nested_unit is None and not any(trainable.isdisjoint(names) for names in setup.units.values())


def setup_of(
    config: CompareConfig, strategy: str, module: nn.Module, optimizer: Optimizer | Mapping[str, Optimizer],
    forward: FirstForward,
) -> Setup:  # fmt: skip
    """The planner's description of a strategy as ``compare`` runs it.

    Args:
        config: the options.
        strategy: a name.
        module: whose structure gives the units.
        optimizer: what it keeps for every parameter, or by name.
        forward: the order of units, and which of them backward reaches.
    """
    options: dict[str, Any] = {"num_ranks": 1 if strategy == "single" else config.data_ranks}
    if takes("precision")(strategy):
        precision = parse_precision(config.precision)
        options |= {
            "compute_dtype": _name(precision.compute), "reduce_dtype": _name(precision.reduce_dtype),
            "scales_loss": config.scales_loss(strategy),
        }  # fmt: skip
    if strategy == "fsdp":
        options |= {
            **_units(config, module, forward), "layout": config.layout, "sharding": config.sharding,
            "prefetch": config.prefetch, "offload": config.offload, "replicate_below": config.replicate_below,
            "shard_group_size": config.shards if config.sharding == "hybrid_shard" else None,
        }  # fmt: skip
    if place(config.ranks, config.device).device_type == "cuda":
        optimizer = _without_counters(optimizer)  # torch keeps them in host memory
    return Setup(
        strategy, bucket_bytes=config.bucket_bytes, partition=config.partition, micro_batches=config.accumulation,
        clip=config.clip is not None, broadcast_buffers=config.broadcast_buffers, optimizer=optimizer, **options,
    )  # fmt: skip


def _without_counters(optimizer: Optimizer | Mapping[str, Optimizer]) -> Optimizer | Mapping[str, Optimizer]:
    def without(kept: Optimizer) -> Optimizer:
        return replace(kept, counter_bytes=0, from_start=kept.from_start and without(kept.from_start))

    if isinstance(optimizer, Optimizer):
        return without(optimizer)
    return {name: without(kept) for name, kept in optimizer.items()}


def _units(config: CompareConfig, module: nn.Module, forward: FirstForward) -> dict[str, Any]:
    """The units, the order in which forward calls them, and those that backward does not reach."""
    units = units_of(module, config.wrap_policy)
    called = None if forward.units is None else [name for name in forward.units if name in units]
    return {"units": units, "called": called, "unreached": forward.unreached}


def against_plan(run: str, records: Records, plan: Plan | None) -> dict[str, Any]:
    """The columns of ``summary.json`` on the plan; null without a plan.

    ``rest_bytes`` is measured. It, ``planned_rest_bytes`` and ``planned_wire_bytes`` are maxima over ranks.
    ``as_planned`` says whether the bytes at rest of every role on every rank, and every message of the last step in
    order, equal the plan; null, with the reason, where they may differ because of the rows.
    """
    rest = _last(records.memory, run, records.memory["where"] == "rest")
    measured: dict[str, Any] = {"rest_bytes": _most(rest)}
    if plan is None:
        return {**measured, "planned_rest_bytes": None, "planned_wire_bytes": None, "as_planned": None}
    measured["planned_rest_bytes"] = _most(plan.memory)
    if plan.collectives is None:
        return {**measured, "planned_wire_bytes": None, "as_planned": None, "not_planned": _BY_ROWS}
    sent = plan.collectives.groupby("rank")["wire_bytes"].sum()
    held = _held(plan.memory) == _held(rest)
    own = records.collectives["phase"] != Phase.METRICS
    recorded = _last(records.collectives, run, own, like=records.steps).sort_values(["rank", "seq"])
    said = _said(plan.collectives) == _said(recorded)
    measured["planned_wire_bytes"] = float(sent.max()) if len(sent) else 0.0
    if plan.by_rows and not (held and said):
        return {**measured, "as_planned": None, "not_planned": _BY_ROWS}
    return {**measured, "as_planned": held and said}


def _last(table: pd.DataFrame, run: str, chosen: pd.Series, like: pd.DataFrame | None = None) -> pd.DataFrame:
    """The chosen rows of a run's last step; ``like`` gives the last step of a table that may have no rows in it."""
    own: pd.DataFrame = table[chosen & (table["run"] == run)]
    steps = own if like is None else like[like["run"] == run]
    last: pd.DataFrame = own[own["step"] == steps["step"].max()]
    return last


def _most(memory: pd.DataFrame) -> int:
    return int(_of_strategy(memory).groupby("rank")["bytes"].sum().max())


def _held(memory: pd.DataFrame) -> dict[tuple[int, str], int]:
    rows = _of_strategy(memory)[["rank", "role", "bytes"]].itertuples(index=False)
    return {(rank, role): num_bytes for rank, role, num_bytes in rows if num_bytes}


def _of_strategy(memory: pd.DataFrame) -> pd.DataFrame:
    """Without what the strategy does not decide: library workspaces on a GPU, and tensors that nobody named."""
    return memory[~memory["role"].isin((Role.WORKSPACE, Role.UNATTRIBUTED))]


def _said(collectives: pd.DataFrame) -> list[tuple[Any, ...]]:
    by_axis = collectives.assign(over_tensor=collectives["axis"] == MeshAxis.TENSOR)
    ordered = by_axis.sort_values(["rank", "over_tensor"], kind="stable")
    return list(ordered[["rank", *MESSAGE]].itertuples(index=False, name=None))


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


_ROLES = {
    "parameter_bytes": (Role.PARAMETER,), "gradient_bytes": (Role.GRADIENT,),
    "optimizer_bytes": (Role.OPTIMIZER_STATE, Role.MASTER_WEIGHT), "offloaded_bytes": (Role.OFFLOADED,),
}  # fmt: skip


def plan(
    workload: Workload | str, ranks: int, strategies: tuple[str, ...] | str = STRATEGIES, **options: Any
) -> pd.DataFrame:
    """One row per strategy: maxima over ranks of bytes at rest by role, of bytes sent and of messages in a step.

    Args:
        workload: what is trained, or the place of it, FILE.py:NAME.
        ranks: number of ranks; they need not fit on this machine.
        strategies: names of ours; those of torch are not planned.
        options: other fields of ``CompareConfig``; buckets have the engines' 25 MiB unless ``bucket_mib`` is given.

    Returns:
        Sizes in bytes; where messages depend on the rows (see ``Plan``) they and the bytes sent are missing. With a
        ``precision`` it has a column of that name: 'full' for strategies that take none.

    Raises:
        ValueError: an option has an invalid value, a strategy cannot be planned, or the data's first batch cannot be
            read here.
    """
    plans = plans_of(workload, ranks, strategies, **options)
    return table_of([row_of(strategy, found) for strategy, found in plans.items()])


def plans_of(
    workload: Workload | str, ranks: int, strategies: tuple[str, ...] | str = STRATEGIES, **options: Any
) -> dict[str, Plan]:
    """The tables behind ``plan``, by strategy; arguments and errors are its."""
    config = to_plan(workload, ranks, (strategies,) if isinstance(strategies, str) else strategies, **options)
    return {strategy: _planned(strategy, found) for strategy, found in plan_runs(config).items()}


def to_plan(workload: Workload | str, ranks: int, strategies: tuple[str, ...], **options: Any) -> CompareConfig:
    """A step of it, with the engines' buckets."""
    if any("bucket_bytes" in engine_options(name) for name in strategies):  # else the option would be refused
        options = {"bucket_mib": DEFAULT_BUCKET_BYTES / 2**20, **options}
    return CompareConfig(workload=workload, ranks=ranks, strategies=strategies, **{"steps": 1, **options})


def _planned(strategy: str, planned: Plan | None) -> Plan:
    if planned is None and strategy not in STRATEGIES:
        raise ValueError(f"strategies: {strategy!r} cannot be planned, for it is not ours; {', '.join(STRATEGIES)} can")
    if planned is None:
        raise ValueError(
            f"strategies: {strategy!r} cannot be planned here: the optimizer's state has other shapes than the "
            "parameters or grows after its first step, a loss calls the model not exactly once (zero3) or an FSDP unit "
            "twice (a reentrant checkpoint calls it again), no forward can be tried to see whether a backward reaches "
            "a frozen FSDP unit, or one that backward gathers again is inside another (wrap one of them, or take "
            "sharding shard_grad_op or no_shard)"
        )
    return planned


def row_of(strategy: str, planned: Plan) -> dict[str, Any]:
    """A row of ``plan``'s table."""
    held, sent = planned.memory.groupby(["role", "rank"])["bytes"].sum(), planned.collectives
    num_bytes, messages = (None, None) if sent is None else (0.0, 0)
    if sent is not None and len(sent):
        by_rank = sent.groupby("rank")
        num_bytes, messages = float(by_rank["wire_bytes"].sum().max()), int(by_rank.size().max())
    return {
        "strategy": strategy, "precision": planned.precision,
        **{name: _largest(held[held.index.isin(roles, level="role")]) for name, roles in _ROLES.items()},
        "rest_bytes": _largest(held), "wire_bytes_per_step": num_bytes, "messages_per_step": messages,
    }  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows as a table of numbers, some of which may be missing; without ``precision`` where it is full in all."""
    table = pd.DataFrame(rows).astype({"wire_bytes_per_step": float, "messages_per_step": "Int64"})
    return table.drop(columns="precision") if (table["precision"] == "full").all() else table


def _largest(held: "pd.Series[int]") -> int:
    """Of the ranks' sums."""
    return int(held.groupby("rank").sum().max()) if len(held) else 0
