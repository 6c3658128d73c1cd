"""Comparisons run one after the other and kept together, so that each can be compared with earlier ones.

history = RunHistory("runs/play")
history.run(CompareConfig(strategies=("zero1",), ranks=2, text="grammar"))
history.run(CompareConfig(strategies=("zero1",), ranks=2, text="grammar", link="1Gbps,100us"))
history.table()                     # a row per run and strategy
loss_curves(history.records().steps)
"""

import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.experiment import CompareConfig, Comparison, claim, compare, load_saved
from shardlab.experiment.comparison import PRELOAD
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.planned.plan import Plan, plans_or_why
from shardlab.experiment.run.rank_run import Progress
from shardlab.experiment.told.answer import Line, answer_of_runs, doubt_of
from shardlab.experiment.told.losses import others_than
from shardlab.experiment.told.summary import COLUMNS, readable_summary
from shardlab.launch import RankPool
from shardlab.records.store import Records
from shardlab.vocabulary import MeshAxis

PREFIX = "run-"
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


class RunHistory:
    """Runs by number, from 1, each in its own directory below ``directory``.

    Args:
        directory: where the runs are; those in it are loaded. None for a temporary directory that is removed with this
            object.

    Attributes:
        runs: every run of which a step was finished, by its number; also those that were stopped or have failed.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shardlab-") if directory is None else None
        self.directory = Path(self._temporary.name if self._temporary is not None else str(directory))
        found = {_number(path): _found(path) for path in sorted(self.directory.glob(f"{PREFIX}*"))}
        self.runs = {number: run for number, run in found.items() if run is not None}
        self._pool: RankPool | None = None
        self._pool_is_for: tuple[int, str, float] | None = None
        self._stopping = threading.Event()

    def next_directory(self) -> Path:
        """The directory of the next run."""
        taken = [_number(path) for path in self.directory.glob(f"{PREFIX}*")]
        return self.directory / f"{PREFIX}{max(taken, default=0) + 1:03}"

    def run(
        self, config: CompareConfig, *, directory: Path | None = None, stopping: threading.Event | None = None
    ) -> int:
        """Run ``config`` and return its number. Ranks stay warm for the next run with the same number of ranks.

        Args:
            config: what to run.
            directory: ``next_directory()``, for callers that need to know it before.
            stopping: what ``stop`` sets, for callers that may want to stop the run before it has begun.

        Raises:
            RankError: a rank failed; what it had recorded is in ``runs``.
            KeyboardInterrupt: ``stop()`` was called from another thread; likewise.
        """
        directory = self.next_directory() if directory is None else directory
        claim(directory)
        number, self._stopping = _number(directory), stopping or threading.Event()

        def progressed(_: Progress) -> None:
            if self._stopping.is_set():  # by stop() between two calls of the pool, which had nothing to interrupt
                raise KeyboardInterrupt

        try:
            comparison = compare(config, directory, pool=self._pool_for(config), on_progress=progressed)
        except BaseException as error:
            if (recorded := _found(directory)) is not None:
                state = State.STOPPED if isinstance(error, KeyboardInterrupt) else State.FAILED
                self.runs[number] = replace(recorded, state=state, config=config)
            raise
        self.runs[number] = PastRun(State.FINISHED, comparison, config)
        return number

    def stop(self) -> None:
        """End the current run, which another thread started; its records so far stay on disk."""
        self._stopping.set()
        if self._pool is not None:
            self._pool.interrupt()

    def close(self) -> None:
        """End the warm ranks, and delete temporary records."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def comparisons(self) -> dict[int, Comparison]:
        """Of the runs, by number."""
        return {number: run.comparison for number, run in self.runs.items()}

    def labels(self) -> list[str]:
        """Every run and strategy as the tables of ``records()`` name them: '2 zero1'."""
        return [f"{number} {name}" for number, one in self.comparisons.items() for name in one.summary["strategy"]]

    def of(self, label: str) -> "tuple[PastRun, str]":
        """The run and the strategy of a label."""
        number, _, strategy = label.partition(" ")
        return self.runs[int(number)], strategy

    def table(self) -> pd.DataFrame:
        """One row per run and strategy, newest first: how it ended, all settings that differ, and the costs."""
        return runs_table(self.runs)

    def answer(self) -> list[Line]:
        """Of all runs: which holds least, which is fastest, and what they send."""
        numbered = self.comparisons.items()
        summaries = [one.summary.assign(strategy=f"{number} " + one.summary["strategy"]) for number, one in numbered]
        doubt = next(filter(None, map(doubt_of, self.comparisons.values())), "")
        causes = {f"{number} {run}": why for number, one in numbered for run, why in one.reasons.items()}
        lines = answer_of_runs(pd.concat(summaries, ignore_index=True), self.records(), causes, doubt)
        return [*lines, Line("CAN I TRUST IT", f"times uncertain, because {doubt}")] if doubt else lines

    def records(self) -> Records:
        """The five tables of all runs; ``run`` is the number and the strategy, such as '2 zero1'.

        Raises:
            ValueError: there are no runs.
        """
        if not self.comparisons:
            raise ValueError("run: nothing has been run yet")
        records = {number: comparison.records for number, comparison in self.comparisons.items()}
        tables = {
            name: pd.concat([
                table.assign(run=(f"{number} " + table["run"].astype(str)).astype("string"))
                for number, one in records.items() for table in (getattr(one, name),)
            ], ignore_index=True)
            for name in (field.name for field in fields(Records) if field.name != "manifests")
        }  # fmt: skip
        manifests = {f"{number} {run}": said for number, one in records.items() for run, said in one.manifests.items()}
        return Records(**tables, manifests=manifests)

    def _pool_for(self, config: CompareConfig) -> RankPool:
        wanted = (config.ranks, config.device, config.timeout_s)
        if self._pool is not None and self._pool_is_for != wanted:
            self._pool.close()  # before other ranks start: they would share the cores, and the memory of a GPU
            self._pool = None
        if self._pool is None:
            self._pool = RankPool(config.ranks, device=config.device, timeout_s=config.timeout_s, preload=PRELOAD)
            self._pool_is_for = wanted
        return self._pool


class State(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # by a person
    FAILED = "failed"  # a rank failed
    UNFINISHED = "unfinished"  # its process was killed, or is still running


@dataclass(frozen=True)
class PastRun:
    """A run, with the steps that all ranks had finished.

    Attributes:
        state: how it ended.
        comparison: its records and summary.
        config: its configuration.
    """

    state: State
    comparison: Comparison
    config: CompareConfig

    def manifest(self, strategy: str) -> Mapping[str, Any]:
        """What was written of one strategy before it ran."""
        return self.comparison.records.manifests[strategy]

    def plan(self, strategy: str) -> Plan | str:
        """The plan of one strategy; or why there is none, as of a workload of an earlier session."""
        if isinstance(self.config.workload, str):
            return "only the name of its workload is known"
        return plans_or_why(self.config)[strategy]


def _found(directory: Path) -> PastRun | None:
    """What a run has recorded; None if it did not finish a step.

    Raises:
        ValueError: it is finished, and its records are damaged.
    """
    is_finished = (directory / "summary.json").is_file()
    try:
        return PastRun(State.FINISHED if is_finished else State.UNFINISHED, *load_saved(directory))
    except ValueError:
        if is_finished:
            raise
        return None


def _number(path: Path) -> int:
    text = path.name.removeprefix(PREFIX)
    return int(text) if text.isdigit() else 0


def runs_table(runs: dict[int, PastRun]) -> pd.DataFrame:
    """One row per run and strategy, newest first: how it ended, all settings that differ, and the costs.

    A setting that a strategy does not take is a dash. It counts as the default, so that a column appears only if
    somebody chose something else.
    """
    if not runs:
        return pd.DataFrame({"run": []})
    kept = [(run, run.comparison.summary.assign(run=number, state=run.state)) for number, run in reversed(runs.items())]
    summary = pd.concat([table.dropna(axis=1, how="all") for _, table in kept], ignore_index=True)
    settings = [settings_of(run, strategy) for run, table in kept for strategy in table["strategy"]]
    costs = readable_summary(summary.reindex(columns=list(COSTS)), {name: COLUMNS[name] for name in COSTS})
    told = summary[["run", "strategy"]].assign(
        # With 'single' one rank trains, with the rows and the threads of all.
        ranks=[_of(trained, one.get("ranks")) for trained, one in zip(summary["ranks"], settings, strict=True)],
        state=summary["state"].map(str),
        steps=[_of(done, one["steps"]) for done, one in zip(summary["steps"], settings, strict=True)],
    )
    if (told["state"] == State.FINISHED).all():
        told = told.drop(columns=["state"] if told["steps"].nunique() > 1 else ["state", "steps"])
    for name in _differing(settings):
        told[WORDS.get(name, name)] = [word(one.get(name)) for one in settings]
    return pd.concat([told, costs.drop(columns="strategy")], axis=1)


def _of(count: int, asked: int | None) -> str:
    return str(count) if asked in (None, count) else f"{count} of {asked}"


def settings_of(run: PastRun, strategy: str) -> dict[str, Any]:
    """What a strategy of a run ran with: its options, what it trained, versions and devices."""
    manifest = run.manifest(strategy)
    options, trained = dict(manifest["config"]), manifest.get("workload") or {}
    named = {"model": trained.get("name") or options.get("workload") or options.get("model")}
    steps = run.comparison.records.steps.query("run == @strategy")
    if options.get("learning_rate") is None:  # the workload's own optimizer
        options["learning_rate"] = float(steps["learning_rate"].iloc[0])
    if options.get("batch") is None:  # the data's own; on all data ranks together, in the first step
        tokens = steps.loc[steps["step"] == steps["step"].min(), "num_tokens"].sum()
        options["rows or tokens"] = int(tokens) // int(manifest["mesh"].get(MeshAxis.TENSOR, 1))
    devices = {"ran on": ", ".join(sorted(set(manifest.get("devices", ())))), "backend": manifest.get("backend")}
    described = {name: trained.get(name) for name in TRAINED}
    return {**options, **named, **described, **manifest.get("versions", {}), **devices}


def unlike(runs: Mapping[str, tuple[PastRun, str]]) -> str:
    """In what runs differ beside their strategies, in words; empty if in nothing.

    Args:
        runs: a run and its strategy, by label.
    """
    settings = [settings_of(run, strategy) for run, strategy in runs.values()]
    names = ["ranks"] if len({one.get("ranks") for one in settings}) > 1 else []
    names += [WORDS.get(name, name) for name in _differing(settings)]
    manifests = {label: run.manifest(strategy) for label, (run, strategy) in runs.items()}
    if others_than(next(iter(manifests)), manifests):
        names.append("the rows they trained on")
    return f"the runs differ in {', '.join(names)}" if names else ""


def _differing(settings: list[dict[str, Any]]) -> list[str]:
    """The settings that are not the same everywhere, in the order of the options."""
    names = dict.fromkeys([*DEFAULTS, *(name for one in settings for name in one)])
    return [name for name in names if name not in SAID_ELSEWHERE and len(_values(name, settings)) > 1]


def _values(name: str, settings: list[dict[str, Any]]) -> set[str]:
    if name in DEFAULTS:
        return {word(one.get(name, DEFAULTS[name])) for one in settings}
    return {word(one[name]) for one in settings if one.get(name)}  # not every workload says it


def word(value: object) -> str:
    """A setting in a cell."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
