"""What each strategy will cost a workload, without running it: bytes at rest, bytes and messages of a step.

    plan(workload, ranks=8)                               # one row per strategy
    plan(workload, ranks=64, strategies="fsdp", precision="bf16", prefetch=2)

The figures are those that ``compare`` checks its records against. The model is built on the meta device where that is
possible, so a model of 7 billion parameters needs neither time nor memory.
"""

from typing import Any

import pandas as pd

from shardlab.engines import engine_options
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned import Plan, plan_runs
from shardlab.experiment.workload import Workload
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.planner.setup import STRATEGIES
from shardlab.vocabulary import Role

_ROLES = {
    "parameter_bytes": (Role.PARAMETER,),
    "gradient_bytes": (Role.GRADIENT,),
    "optimizer_bytes": (Role.OPTIMIZER_STATE, Role.MASTER_WEIGHT),
    "offloaded_bytes": (Role.OFFLOADED,),
}


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
    names = (strategies,) if isinstance(strategies, str) else strategies
    if any("bucket_bytes" in engine_options(name) for name in names):  # else the option would be refused
        options = {"bucket_mib": DEFAULT_BUCKET_BYTES / 2**20, **options}
    config = CompareConfig(workload=workload, ranks=ranks, strategies=names, **{"steps": 1, **options})
    return {strategy: _planned(strategy, found) for strategy, found in plan_runs(config).items()}


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
        "strategy": strategy,
        "precision": planned.precision,
        **{name: _largest(held[held.index.isin(roles, level="role")]) for name, roles in _ROLES.items()},
        "rest_bytes": _largest(held),
        "wire_bytes_per_step": num_bytes,
        "messages_per_step": messages,
    }


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows as a table of numbers, some of which may be missing; without ``precision`` where it is full in all."""
    table = pd.DataFrame(rows).astype({"wire_bytes_per_step": float, "messages_per_step": "Int64"})
    return table.drop(columns="precision") if (table["precision"] == "full").all() else table


def _largest(held: "pd.Series[int]") -> int:
    """Of the ranks' sums."""
    return int(held.groupby("rank").sum().max()) if len(held) else 0
