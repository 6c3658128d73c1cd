"""Comparisons run one after the other and kept together, so that each can be compared with earlier ones.

history = RunHistory("runs/play")
history.run(CompareConfig(strategies=("zero1",), ranks=2, text="grammar"))
history.run(CompareConfig(strategies=("zero1",), ranks=2, text="grammar", link="1Gbps,100us"))
history.table()                     # a row per run and strategy
loss_curves(history.records().steps)
"""

import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.experiment import CompareConfig, Comparison, compare, load_comparison
from shardlab.experiment.comparison import PRELOAD
from shardlab.experiment.run import Progress
from shardlab.experiment.saved import fields_of
from shardlab.experiment.summary import COLUMNS, readable_summary
from shardlab.launch import RankPool
from shardlab.trace.store import Records

PREFIX = "run-"
SHOWN = (
    "model",
    "link",
    "bucket_mib",
    "precision",
    "sharding",
)  # fields of the configuration, shown if runs differ in them
COSTS = ("strategy", "ranks", "loss_last", "step_ms", "exposed_comm_ms", "overlap", "peak_bytes", "wire_bytes_per_step")


class RunHistory:
    """Runs by number, from 1, each in its own directory below ``directory``.

    Args:
        directory: where the runs are; finished runs in it are loaded. None for a temporary directory that is removed
            with this object.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shardlab-") if directory is None else None
        self.directory = Path(self._temporary.name if self._temporary is not None else str(directory))
        self.comparisons: dict[int, Comparison] = dict(_finished(self.directory))
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
            RankError: a rank failed; the records so far stay on disk.
            KeyboardInterrupt: ``stop()`` was called from another thread.
        """
        directory = self.next_directory() if directory is None else directory
        self._stopping = False

        def progressed(progress: Progress) -> None:
            if self._stopping:  # stop() was called between two calls of the pool, which had nothing to interrupt
                raise KeyboardInterrupt
            if on_progress is not None:
                on_progress(progress)

        comparison = compare(config, directory, pool=self._pool_for(config), on_progress=progressed)
        self.comparisons[_number(directory)] = comparison
        return _number(directory)

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

    def config_of(self, number: int) -> dict[str, Any]:
        """The configuration of a run, from its manifest."""
        return fields_of(next(iter(self.comparisons[number].records.manifests.values())))

    def labels(self) -> list[str]:
        """Every run and strategy as the tables of ``records()`` name them: '2 zero1'."""
        return [
            label(number, strategy)
            for number, comparison in self.comparisons.items()
            for strategy in comparison.summary["strategy"]
        ]

    def table(self) -> pd.DataFrame:
        """One row per run and strategy, newest first: the options that differ, and the costs."""
        configs = {number: self.config_of(number) for number in self.comparisons}
        differing = [name for name in SHOWN if len({str(config.get(name)) for config in configs.values()}) > 1]
        parts = []
        for number, comparison in reversed(self.comparisons.items()):
            costs = readable_summary(comparison.summary, {name: COLUMNS[name] for name in COSTS})
            costs.insert(0, "run", number)
            for place, name in enumerate(differing):
                costs.insert(3 + place, name.removesuffix("_mib"), _word(configs[number].get(name)))
            parts.append(costs)
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"run": []})

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


def _finished(directory: Path) -> list[tuple[int, Comparison]]:
    found = sorted(path for path in directory.glob(f"{PREFIX}*") if (path / "summary.json").is_file())
    return [(_number(path), load_comparison(path)) for path in found]


def _number(path: Path) -> int:
    text = path.name.removeprefix(PREFIX)
    return int(text) if text.isdigit() else 0


def _word(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
