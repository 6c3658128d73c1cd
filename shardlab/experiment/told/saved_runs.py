"""The result of a comparison, and loading what ``compare`` wrote: finished, cut off, or one run of it.

Beside its numbers stands whether a record agrees with the plan in every byte and message.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.directory import run_directory
from shardlab.experiment.planned.plan import BY_ROWS, Plan
from shardlab.experiment.told.pipelined import bubbles
from shardlab.experiment.told.step_reasons import Reasons, reasons
from shardlab.experiment.told.summary import COLUMNS, stepped, summarise
from shardlab.field_types import check_types
from shardlab.records.store import Records, load_runs, run_directories, whole_steps
from shardlab.vocabulary import Phase, Role

NEEDED: dict[str, Any] = {
    "config": dict, "versions": dict, "devices": list, "backend": str | None, "ranks": int, "mesh": dict | None,
    "padding_bytes": int | None, "recorder_share": float | None,
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    Attributes:
        summary: one row per strategy, the columns of ``summary.json``.
        records: the five tables of all strategies; ``run`` is the strategy.
        directory: where the files are.
        failed: by strategy that raised on a rank, what it raised; it has no row.
    """

    summary: pd.DataFrame
    records: Records
    directory: Path
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def losses_equal(self) -> bool:
        """Whether all losses equal the reference's; False if one is inf or NaN, True for a single strategy."""
        return not (self.summary["losses_equal"] == False).any()  # noqa: E712  (None is neither)

    @cached_property
    def reasons(self) -> dict[str, Reasons]:
        """Why the steps of each strategy take as long as they do."""
        return reasons(self.records)

    @cached_property
    def bubbles(self) -> pd.DataFrame:
        """How long ranks of pipelines wait for other stages; empty without pipelines."""
        return bubbles(self.records)


def load_comparison(directory: Path | str) -> Comparison:
    """Load a finished comparison from ``directory``.

    Raises:
        ValueError: there is no finished comparison, or its summary is damaged.
    """
    directory = Path(directory)
    path = directory / "summary.json"
    if not path.is_file():
        raise ValueError(f"out: {directory} has no summary.json, so it is not a finished comparison")
    summary, failed = _summary(path)
    records = load_runs(run_directory(directory, strategy) for strategy in summary["strategy"])
    return Comparison(summary, records, directory, failed)


def _summary(path: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The rows of what has run, and why the other strategies have not."""
    try:
        rows = json.loads(path.read_text())
        summary = pd.DataFrame([row for row in rows if "failed" not in row]).astype({"strategy": str})
        summary[list(COLUMNS)]  # an older shardlab wrote fewer
        return summary, {row["strategy"]: row["failed"] for row in rows if "failed" in row}
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"run: {path} is damaged: {error!r}; remove the file, and 'shardlab report' computes it again from the "
            "records"
        ) from error


def load_saved(directory: Path | str) -> tuple[Comparison, CompareConfig]:
    """The comparison in ``directory`` and the configuration it ran with.

    A finished comparison is read as it is. If it was cut off, or for a single run, the summary is computed from the
    steps that all ranks have finished, and not compared with the plan.

    Raises:
        ValueError: there is neither a run nor a comparison, a record is damaged or has a newer format, no step was
            finished, or ``compare`` did not write it.
    """
    directory = Path(directory)
    if (directory / "summary.json").is_file():
        comparison = load_comparison(directory)
        check_steps(comparison.records, directory, comparison.summary["strategy"])
        return comparison, config_of(comparison.records)
    records = whole_steps(load_runs(run_directories(directory)))
    config = config_of(records)
    check_steps(records, directory)
    rows = [row | against_plan(row["strategy"], records, "") for row in summarise(records, config.dtype)]
    rows.sort(key=lambda row: [*config.strategies, row["strategy"]].index(row["strategy"]))
    return Comparison(pd.DataFrame(rows), records, directory), config


def check_steps(records: Records, directory: Path, runs: Iterable[str] = ()) -> None:
    """Raise ValueError unless a step was finished, and one of each of ``runs``."""
    missing = sorted(set(runs) - set(records.steps["run"]))
    if missing or not len(records.steps):
        where = f"{directory}{', in the records of ' if missing else ''}{', '.join(missing)}"
        raise ValueError(f"run: in {where} no rank has finished a step, so there is nothing to report")


def check_complete(records: Records, by: str) -> None:
    """Raise ValueError unless the manifests have what the report of a command needs."""
    for run, manifest in records.manifests.items():
        kinds = NEEDED | {name: dict for name in ("not_finite", "workload") if name in manifest}
        if wrong := [name for name, kind in kinds.items() if not isinstance(manifest.get(name, ...), kind)]:
            raise ValueError(
                f"run: {run}'s manifest has no right {', '.join(wrong)}, so {by!r} did not write it; load_run reads it"
            )


def config_of(records: Records) -> CompareConfig:
    """The configuration in the manifests. It is not checked: text and devices may belong to another machine.

    Raises:
        ValueError: ``compare`` did not write a manifest.
    """
    check_complete(records, "compare")
    known: dict[str, Any] = {}
    for run, manifest in records.manifests.items():
        if "recorded" in manifest:
            raise ValueError(
                f"run: {run} is the record of a script, which has no options to change or to read; 'shardlab report' "
                "says what takes its time and what one change would gain. Give what 'shardlab compare' has written"
            )
        if not manifest["config"].get("strategies"):
            raise ValueError(f"run: the configuration in the manifest of {run} is damaged: it names no strategies")
        known |= manifest["config"]
    config = object.__new__(CompareConfig)
    for one in fields(CompareConfig):
        value = known.get(one.name, one.default)
        object.__setattr__(config, one.name, tuple(value) if isinstance(value, list) else value)
    try:
        # These are checked with the manifest.
        check_types(config, besides=("strategies", "schedule", "begins", "workload", "wrap"))
    except ValueError as error:
        raise ValueError(f"run: the configuration in the manifests is damaged: {error}") from None
    return config


_BY_STEP = "what it {} differs from step to step"
MESSAGE = ["op", "axis", "tag", "dtype", "numel", "bytes", "wire_bytes", "group_size"]


def against_plan(run: str, records: Records, plan: Plan | str) -> dict[str, Any]:
    """The columns of ``summary.json`` on the plan; null without a plan.

    ``rest_bytes`` is measured. It, ``planned_rest_bytes`` and ``planned_wire_bytes`` are maxima over ranks.
    ``as_planned`` says whether the bytes at rest of every role on every rank, and every message of the last step in
    order, equal the plan, which is of the first batch; null, with the reason, where they may differ because of the
    rows, and where they differ and steps do so too.
    """
    rest = _last(records.memory, run, records.memory["where"] == "rest")
    unknown = dict.fromkeys(("planned_rest_bytes", "planned_wire_bytes", "as_planned", "not_planned"))
    found: dict[str, Any] = {"rest_bytes": _most(rest), **unknown}
    if isinstance(plan, str):
        return found | {"not_planned": plan}
    found["planned_rest_bytes"] = _most(plan.memory)
    if plan.collectives is None:
        return found | {"not_planned": plan.why}
    sent = plan.collectives.groupby("rank")["wire_bytes"].sum()
    held = _held(plan.memory) == _held(rest)
    own = records.collectives["phase"] != Phase.METRICS
    said = _said(plan.collectives) == _said(_last(records.collectives, run, own, like=stepped(records.steps, records)))
    found["planned_wire_bytes"] = float(sent.max()) if len(sent) else 0.0
    if not (held and said) and plan.by_rows:
        return found | {"not_planned": BY_ROWS}
    if (plan.is_own or not said) and _differ(records.collectives[own & (records.collectives["run"] == run)]):
        return found | {"not_planned": _BY_STEP.format("sends")}
    if not held and _differs_at_rest(records.memory[records.memory["run"] == run]):
        return found | {"not_planned": _BY_STEP.format("holds")}
    return found | {"as_planned": held and said}


def _differ(collectives: pd.DataFrame) -> bool:
    """Whether steps after the first one sent different messages."""
    steps = range(1, int(collectives["step"].max()) + 1)
    return len({tuple(_said(collectives[collectives["step"] == step])) for step in steps}) > 1


def _differs_at_rest(memory: pd.DataFrame) -> bool:
    """Whether a run held other bytes at rest after one step than after another."""
    rest = memory[memory["where"] == "rest"]
    return len({frozenset(_held(rows).items()) for _, rows in rest.groupby("step")}) > 1


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
