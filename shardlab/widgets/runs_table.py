"""The table of a history: a row per run and strategy, with everything in which two of them differ."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from shardlab.experiment.options import CompareOptions
from shardlab.experiment.rank_checks import others_than
from shardlab.experiment.saved import fields_of
from shardlab.experiment.summary import COLUMNS, readable_summary
from shardlab.vocabulary import MeshAxis
from shardlab.widgets.past_run import PastRun, State

COSTS = (
    "strategy", "loss_last", "step_ms", "exposed_comm_ms", "overlap", "peak_bytes", "wire_bytes_per_step",
    "moved_bytes_per_step",
)  # fmt: skip
# Names of options where they are shown; the others are shown as they are.
WORDS = {
    "strategies": "strategy", "bucket_mib": "bucket (MiB)", "seq_len": "sequence", "learning_rate": "learning rate",
}  # fmt: skip
# Of a manifest's description of what was trained; the rest is among the options.
TRAINED = ("module", "parameters", "trainable", "data", "loss", "optimizer", "commit")
DEFAULTS = {field.name: field.default for field in fields(CompareOptions)}
SAID_ELSEWHERE = ("strategies", "workload", "ranks", "steps")  # in columns of their own


@dataclass(frozen=True)
class Row:
    """One strategy of one run."""

    number: int
    run: PastRun
    costs: pd.DataFrame
    settings: dict[str, Any]

    @classmethod
    def of(cls, number: int, run: PastRun) -> Iterator["Row"]:
        """The rows of a run."""
        for place, strategy in enumerate(run.summary["strategy"]):
            yield cls(number, run, run.summary.iloc[[place]], settings_of(run, strategy))

    @property
    def ranks(self) -> str:
        """How many trained: with 'single' one, with the rows and the threads of all."""
        trained, asked = int(self.costs["ranks"].iloc[0]), self.settings.get("ranks")
        return str(trained) if asked in (None, trained) else f"{trained} of {asked}"

    @property
    def steps(self) -> str:
        """How many steps it had finished."""
        done, asked = int(self.costs["steps"].iloc[0]), self.settings["steps"]
        return str(done) if done == asked else f"{done} of {asked}"


def runs_table(runs: dict[int, PastRun]) -> pd.DataFrame:
    """One row per run and strategy, newest first: how it ended, all settings that differ, and the costs.

    A setting that a strategy does not take is a dash. It counts as the default, so that a column appears only if
    somebody chose something else.
    """
    rows = [row for number, run in reversed(runs.items()) for row in Row.of(number, run)]
    if not rows:
        return pd.DataFrame({"run": []})
    costs = readable_summary(pd.concat([row.costs.dropna(axis=1) for row in rows]).reindex(columns=list(COSTS)),
                             {name: COLUMNS[name] for name in COSTS}).reset_index(drop=True)  # fmt: skip
    told = {"run": [row.number for row in rows], "strategy": costs.pop("strategy"), "ranks": [r.ranks for r in rows]}
    if any(row.run.state != State.FINISHED for row in rows):
        told["state"] = [str(row.run.state) for row in rows]
    if len({row.steps for row in rows}) > 1 or "state" in told:
        told["steps"] = [row.steps for row in rows]
    told |= {
        WORDS.get(name, name): [word(row.settings.get(name)) for row in rows]
        for name in differing(row.settings for row in rows)
    }
    return pd.concat([pd.DataFrame(told), costs], axis=1)


def settings_of(run: PastRun, strategy: str) -> dict[str, Any]:
    """What a strategy of a run ran with: its options, what it trained, versions and devices."""
    manifest = run.manifest(strategy)
    options, trained = fields_of(manifest), manifest.get("workload") or {}
    named = {"model": trained.get("name") or options.get("workload") or options.get("model")}
    rates = None if run.comparison is None else run.comparison.records.steps.query("run == @strategy")["learning_rate"]
    if options.get("learning_rate") is None and rates is not None and len(rates):  # the workload's own optimizer
        options["learning_rate"] = float(rates.iloc[0])
    if options.get("batch") is None and run.comparison is not None:  # the data's own
        options["rows or tokens"] = _trained_in_first_step(run.comparison.records.steps, manifest, strategy)
    devices = {"ran on": ", ".join(sorted(set(manifest.get("devices", ())))), "backend": manifest.get("backend")}
    described = {name: trained.get(name) for name in TRAINED}
    return {**options, **named, **described, **manifest.get("versions", {}), **devices}


def _trained_in_first_step(steps: pd.DataFrame, manifest: Mapping[str, Any], strategy: str) -> int:
    """On all data ranks together."""
    own = steps[steps["run"] == strategy]
    first = own[own["step"] == own["step"].min()]
    return int(first["num_tokens"].sum()) // int(manifest["mesh"].get(MeshAxis.TENSOR, 1))


def unlike(runs: Mapping[str, tuple[PastRun, str]]) -> str:
    """In what runs differ beside their strategies, in words; empty if in nothing.

    Args:
        runs: a run and its strategy, by label.
    """
    settings = [settings_of(run, strategy) for run, strategy in runs.values()]
    names = ["ranks"] if len({one.get("ranks") for one in settings}) > 1 else []
    names += [WORDS.get(name, name) for name in differing(settings)]
    manifests = {label: run.manifest(strategy) for label, (run, strategy) in runs.items()}
    if others_than(next(iter(manifests)), manifests):
        names.append("the rows they trained on")
    return f"the runs differ in {', '.join(names)}" if names else ""


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same everywhere, in the order of the options."""
    settings = list(settings)
    names = dict.fromkeys([*DEFAULTS, *(name for one in settings for name in one)])
    return [name for name in names if name not in SAID_ELSEWHERE and len(_values(name, settings)) > 1]


def _values(name: str, settings: list[Mapping[str, Any]]) -> set[str]:
    if name in DEFAULTS:
        return {word(one.get(name, DEFAULTS[name])) for one in settings}
    return {word(one[name]) for one in settings if one.get(name)}  # a run without a finished step has not said it


def word(value: object) -> str:
    """A setting in a cell."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
