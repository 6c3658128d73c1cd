"""Comparisons run one after the other and kept together, so that each can be compared with earlier ones.

history = RunHistory("runs/play")
history.run(CompareConfig(strategies=("zero1",), ranks=2, text="grammar"))
history.run(CompareConfig(strategies=("zero1",), ranks=2, text="grammar", link="1Gbps,100us"))
history.table()                     # a row per run and strategy
loss_curves(history.records().steps)
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pandas as pd

from shardlab.experiment import CompareConfig, Comparison, claim, compare
from shardlab.experiment.comparison import PRELOAD
from shardlab.experiment.run import Progress
from shardlab.launch import RankPool
from shardlab.trace.store import Records
from shardlab.widgets.past_run import PastRun, State, ended_early, finished, found
from shardlab.widgets.runs_table import runs_table

PREFIX = "run-"


class RunHistory:
    """Runs by number, from 1, each in its own directory below ``directory``.

    Args:
        directory: where the runs are; those in it are loaded. None for a temporary directory that is removed with this
            object.

    Attributes:
        runs: every run by its number, also those that were stopped or have failed.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shardlab-") if directory is None else None
        self.directory = Path(self._temporary.name if self._temporary is not None else str(directory))
        self.runs: dict[int, PastRun] = dict(_earlier(self.directory))
        self._pool: RankPool | None = None
        self._pool_is_for: tuple[int, str, float] | None = None
        self._stopping = False

    def next_directory(self) -> Path:
        """The directory of the next run."""
        taken = [_number(path) for path in self.directory.glob(f"{PREFIX}*")]
        return self.directory / f"{PREFIX}{max(taken, default=0) + 1:03}"

    def run(
        self,
        config: CompareConfig,
        *,
        directory: Path | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> int:
        """Run ``config`` and return its number. Ranks stay warm for the next run with the same number of ranks.

        Args:
            config: what to run.
            directory: ``next_directory()``, for callers that need to know it before.
            on_progress: called after every step of rank 0.

        Raises:
            RankError: a rank failed; what it had recorded is in ``runs``.
            KeyboardInterrupt: ``stop()`` was called from another thread; likewise.
        """
        directory = self.next_directory() if directory is None else directory
        claim(directory)
        number, self._stopping = _number(directory), False

        def progressed(progress: Progress) -> None:
            if self._stopping:  # stop() was called between two calls of the pool, which had nothing to interrupt
                raise KeyboardInterrupt
            if on_progress is not None:
                on_progress(progress)

        try:
            comparison = compare(config, directory, pool=self._pool_for(config), on_progress=progressed)
        except BaseException as error:
            state = State.STOPPED if isinstance(error, KeyboardInterrupt) else State.FAILED
            self.runs[number] = ended_early(directory, state, config)
            raise
        self.runs[number] = finished(comparison, config)
        return number

    def stop(self) -> None:
        """End the current run, which another thread started; its records so far stay on disk."""
        self._stopping = True
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
        """The runs of which a step was finished, by number."""
        return {number: run.comparison for number, run in self.runs.items() if run.comparison is not None}

    def labels(self) -> list[str]:
        """Every run and strategy as the tables of ``records()`` name them: '2 zero1'."""
        return [
            label(number, strategy)
            for number, comparison in self.comparisons.items()
            for strategy in comparison.summary["strategy"]
        ]

    def table(self) -> pd.DataFrame:
        """One row per run and strategy, newest first: how it ended, all settings that differ, and the costs."""
        return runs_table(self.runs)

    def records(self) -> Records:
        """The five tables of all runs; ``run`` is the number and the strategy, such as '2 zero1'.

        Raises:
            ValueError: there are no runs.
        """
        if not self.comparisons:
            raise ValueError("run: nothing has been run yet")
        names = [field.name for field in fields(Records) if field.name != "manifests"]
        tables = {
            name: pd.concat(
                [
                    _relabelled(getattr(comparison.records, name), number)
                    for number, comparison in self.comparisons.items()
                ],
                ignore_index=True,
            )
            for name in names
        }
        manifests = {
            label(number, run): manifest
            for number, comparison in self.comparisons.items()
            for run, manifest in comparison.records.manifests.items()
        }
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


def label(number: int, run: str) -> str:
    """The name of a run of a history in figures."""
    return f"{number} {run}"


def _relabelled(frame: pd.DataFrame, number: int) -> pd.DataFrame:
    return frame.assign(run=(f"{number} " + frame["run"].astype(str)).astype("string"))


def _earlier(directory: Path) -> Iterator[tuple[int, PastRun]]:
    """The runs of earlier sessions whose records can be loaded, each with its number."""
    for path in sorted(directory.glob(f"{PREFIX}*")):
        if (run := found(path)).config is not None:
            yield _number(path), run


def _number(path: Path) -> int:
    text = path.name.removeprefix(PREFIX)
    return int(text) if text.isdigit() else 0
