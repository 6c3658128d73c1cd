"""The result of a comparison, and loading what ``compare`` wrote: finished, cut off, or one run of it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.directory import run_directory
from shardlab.experiment.told.as_planned import against_plan
from shardlab.experiment.told.pipelined import bubbles
from shardlab.experiment.told.step_reasons import Reasons, reasons
from shardlab.experiment.told.summary import COLUMNS, summarise
from shardlab.field_types import check_types
from shardlab.records.store import Records, load_runs, run_directories, whole_steps

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
