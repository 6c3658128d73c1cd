"""Whether a record agrees with the plan in every byte and message."""

from typing import Any

import pandas as pd

from shardlab.experiment.planned.plan import BY_ROWS, Plan
from shardlab.records.store import Records
from shardlab.vocabulary import Phase, Role

_BY_STEP = "what it sends differs from step to step"
MESSAGE = ["op", "axis", "tag", "dtype", "numel", "bytes", "wire_bytes", "group_size"]


def against_plan(run: str, records: Records, plan: Plan | str) -> dict[str, Any]:
    """The columns of ``summary.json`` on the plan; null without a plan.

    ``rest_bytes`` is measured. It, ``planned_rest_bytes`` and ``planned_wire_bytes`` are maxima over ranks.
    ``as_planned`` says whether the bytes at rest of every role on every rank, and every message of the last step in
    order, equal the plan; null, with the reason, where they may differ because of the rows.
    """
    rest = _last(records.memory, run, records.memory["where"] == "rest")
    measured: dict[str, Any] = {"rest_bytes": _most(rest)}
    unknown = {"planned_wire_bytes": None, "as_planned": None}
    if isinstance(plan, str):
        return {**measured, "planned_rest_bytes": None, **unknown, "not_planned": plan}
    measured["planned_rest_bytes"] = _most(plan.memory)
    if plan.collectives is None:
        return {**measured, **unknown, "not_planned": plan.why}
    sent = plan.collectives.groupby("rank")["wire_bytes"].sum()
    held = _held(plan.memory) == _held(rest)
    own = records.collectives["phase"] != Phase.METRICS
    said = _said(plan.collectives) == _said(_last(records.collectives, run, own, like=records.steps))
    measured["planned_wire_bytes"] = float(sent.max()) if len(sent) else 0.0
    if not (held and said) and plan.by_rows:
        return {**measured, "as_planned": None, "not_planned": BY_ROWS}
    if not (held and said) and plan.is_own and _differ(records.collectives[own & (records.collectives["run"] == run)]):
        return {**measured, "as_planned": None, "not_planned": _BY_STEP}
    return {**measured, "as_planned": held and said, "not_planned": None}


def _differ(collectives: pd.DataFrame) -> bool:
    """Whether steps after the first one sent different messages."""
    steps = range(1, int(collectives["step"].max()) + 1)
    return len({tuple(_said(collectives[collectives["step"] == step])) for step in steps}) > 1


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
    ordered = collectives.sort_values(["rank", "seq"])
    return list(ordered[["rank", *MESSAGE]].itertuples(index=False, name=None))
