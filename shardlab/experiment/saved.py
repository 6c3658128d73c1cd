"""What ``compare`` has left on disk, also where it was cut off, and also one strategy of it alone."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.experiment.comparison import Comparison, run_directory
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned import against_plan
from shardlab.experiment.summary import COLUMNS, summarise
from shardlab.tables import TABLES
from shardlab.trace.store import Records, load_runs, run_directories

NEEDED = ("config", "versions", "devices", "backend")


def load_comparison(directory: Path | str) -> Comparison:
    """What ``compare`` wrote into ``directory``.

    Raises:
        ValueError: it holds no comparison.
    """
    directory = Path(directory)
    path = directory / "summary.json"
    if not path.is_file():
        raise ValueError(f"out: {directory} holds no summary.json, so it is no finished comparison")
    summary = pd.DataFrame(json.loads(path.read_text()))
    records = load_runs(run_directory(directory, strategy) for strategy in summary["strategy"])
    return Comparison(summary, records, directory)


def load_saved(directory: Path | str) -> tuple[Comparison, CompareConfig]:
    """The comparison in ``directory`` and the configuration it ran with.

    A finished comparison is read as it is. Of one that was cut off, and of one run alone, the summary is made from the
    steps that all ranks have finished; it is not held against the plan.

    Raises:
        ValueError: there is neither a run nor a comparison, a record is damaged or of a newer format, no step was
            finished, or ``compare`` did not write it.
    """
    directory = Path(directory)
    if (directory / "summary.json").is_file():
        comparison = load_comparison(directory)
        missing = [name for name in COLUMNS if name not in comparison.summary.columns]
        if missing:
            raise ValueError(
                f"run: {directory / 'summary.json'} has no {', '.join(missing)}: an older shardlab wrote it; remove "
                "the file, and the summary is made anew from the records"
            )
        return comparison, config_of(comparison.records)
    records = _whole_steps(load_runs(run_directories(directory)))
    config = config_of(records)
    if not len(records.steps):
        raise ValueError(f"run: in {directory} no rank has finished a step, so there is nothing to report")
    rows = [row | against_plan(row["strategy"], records, None) for row in summarise(records, config.dtype)]
    rows.sort(key=lambda row: config.strategies.index(row["strategy"]))
    return Comparison(pd.DataFrame(rows), records, directory), config


def config_of(records: Records) -> CompareConfig:
    """The configuration that the manifests tell of. It is not checked: text and devices may be of another machine.

    Raises:
        ValueError: a manifest is not one of ``compare``.
    """
    known: dict[str, Any] = {}
    for run, manifest in records.manifests.items():
        missing = [name for name in NEEDED if name not in manifest]
        if missing:
            raise ValueError(
                f"run: the manifest of {run} has no {', '.join(missing)}, so 'compare' did not write it; "
                "load_run reads it"
            )
        known |= manifest["config"]
    config = object.__new__(CompareConfig)
    for field in fields(CompareConfig):
        value = known.get(field.name, field.default)
        object.__setattr__(config, field.name, tuple(value) if isinstance(value, list) else value)
    return config


def _whole_steps(records: Records) -> Records:
    """Without the steps that only some ranks have finished."""
    steps = records.steps
    ranks = steps.groupby("run")["rank"].transform("nunique")
    whole = steps[steps.groupby(["run", "step"])["rank"].transform("nunique") == ranks]
    last = whole.groupby("run")["step"].max()
    tables = {}
    for name in TABLES:
        table = getattr(records, name)
        tables[name] = table[table["step"] <= table["run"].map(last)]  # of a run without any: nothing
    return Records(**tables, manifests=records.manifests)
