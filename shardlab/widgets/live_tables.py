"""Reading a run while it is being written: only new entries are read, and only a few of them are decoded.

All entries of rank 0 are decoded, for losses and times, but only the last two of other ranks, for the timeline of the
newest step that every rank has finished. Watching costs the ranks nothing but the cores it shares with them.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from shardlab.tables import COLLECTIVES, MEMORY, SPANS, STEPS, Table
from shardlab.trace.entries import Columns, EntryStream, joined
from shardlab.trace.store import load_run

Tables = Mapping[str, Columns]
"""The tables of one entry: one step of one rank."""
KEPT = 2  # a rank is never more than one step ahead of another: the loss is a collective
MAX_STEPS = 5000  # of one run; beyond, every other step is dropped


@dataclass(frozen=True)
class LiveTables:
    """The tables of one run, or of the runs in a directory, so far.

    Attributes:
        steps: table ``steps`` of rank 0.
        memory: table ``memory``: the last sample at rest of every rank of each run.
        collectives: those of the newest step that all ranks of the newest run have finished.
        spans: those of the same step.
    """

    steps: pd.DataFrame
    memory: pd.DataFrame
    collectives: pd.DataFrame
    spans: pd.DataFrame


def read_progress(directory: Path | str) -> LiveTables:
    """What the runs in ``directory`` have written so far; empty tables if nothing.

    Args:
        directory: where ``compare`` writes, or the directory of one run; it need not exist yet.

    Raises:
        ValueError: a record is damaged, or has a newer format.
    """
    tail = DirectoryTail(directory)
    try:
        return tail.read()
    finally:
        tail.close()


class DirectoryTail:
    """Follows all runs that a comparison writes into a directory, or the single run of a run's directory."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._runs: dict[Path, RunTail] = {}
        self._progress: LiveTables | None = None

    def read(self) -> LiveTables:
        """Read new entries and return everything so far.

        Raises:
            ValueError: a record is damaged, or has a newer format.
        """
        for directory in _run_directories(self.directory):
            if directory not in self._runs:
                self._runs[directory] = RunTail(directory)
        before = [run.progress for run in self._runs.values()]
        runs = [run.read() for run in self._runs.values()]
        if self._progress is not None and all(one is other for one, other in zip(before, runs, strict=True)):
            return self._progress  # the same object tells the caller that there is nothing to draw
        begun = [run for run in runs if len(run.steps)]
        newest = begun[-1:]
        self._progress = LiveTables(
            steps=_joined(STEPS, (run.steps for run in begun)),
            memory=_joined(MEMORY, (run.memory for run in begun)),
            collectives=_joined(COLLECTIVES, (run.collectives for run in newest)),
            spans=_joined(SPANS, (run.spans for run in newest)),
        )
        return self._progress

    def close(self) -> None:
        """Close the files."""
        for run in self._runs.values():
            run.close()


class RunTail:
    """Follows the files of one run. Open files stay readable when the run ends and removes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._streams: dict[str, EntryStream] = {}
        self._last: dict[str, deque[Tables]] = {}  # the last steps of each rank
        self._rest: dict[str, Tables] = {}  # the last entry of each rank with a sample at rest
        self._steps: list[Tables] = []  # those of rank 0
        self.progress = LiveTables(*(table.frame([]) for table in (STEPS, MEMORY, COLLECTIVES, SPANS)))
        """The result of the last ``read``."""
        self._was_missed = False  # a rank removed its file before it was opened

    def read(self) -> LiveTables:
        """Read new entries and return everything so far: the same object if nothing is new."""
        for path in sorted(self.directory.glob("rank*.journal")):
            if path.stem not in self._streams:
                with suppress(FileNotFoundError):  # the rank ended between glob and open
                    self._streams[path.stem] = EntryStream(path)
        if not self._was_missed and _has_ended_without(self.directory, self._streams):
            self.progress, self._was_missed = _ended(self.directory), True
        if self._was_missed or not sum(self._take(name, stream) for name, stream in self._streams.items()):
            return self.progress
        latest = self._latest()
        self.progress = LiveTables(
            steps=_table(self._steps, STEPS),
            memory=_table(self._rest.values(), MEMORY),
            collectives=_table(latest, COLLECTIVES),
            spans=_table(latest, SPANS),
        )
        return self.progress

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()

    def _take(self, name: str, stream: EntryStream) -> int:
        """Take the new entries of one rank, and return their number."""
        new = list(stream.new())
        for tables in map(stream.tables, new if name == "rank0" else new[-KEPT:]):
            if STEPS.name not in tables:
                continue  # the setup before the first step, or the shards after the last
            self._last.setdefault(name, deque(maxlen=KEPT)).append(tables)
            if "rest" in tables.get(MEMORY.name, {}).get("where", ()):
                self._rest[name] = tables
            if name == "rank0":
                self._steps.append({STEPS.name: tables[STEPS.name]})
        if len(self._steps) > MAX_STEPS:
            self._steps = self._steps[::2]
        return len(new)

    def _latest(self) -> list[Tables]:
        """Tables of all ranks for the newest step that all have finished."""
        if not self._last or len(self._last) < len(self._streams):
            return []
        common = set.intersection(*({_step_of(tables) for tables in last} for last in self._last.values()))
        return [tables for last in self._last.values() for tables in last if common and _step_of(tables) == max(common)]


def _step_of(tables: Tables) -> int:
    (step,) = tables[STEPS.name]["step"]
    return int(step)


def _table(entries: Iterable[Tables], table: Table) -> pd.DataFrame:
    """The rows of one table in some entries."""
    # Table memory has samples within the step too, but the live view shows only bytes at rest.
    frame = table.frame(pd.DataFrame(joined(entries, table), dtype=object))
    return frame[frame["where"] == "rest"] if table is MEMORY else frame


def _joined(table: Table, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    some = [frame for frame in frames if len(frame)]
    return pd.concat(some, ignore_index=True) if some else table.frame([])


def _run_directories(directory: Path) -> list[Path]:
    """The directories of a comparison's runs, the current one last; else the directory itself."""
    inside = [path for path in (directory / "records").glob("*") if path.is_dir()]
    return sorted(inside, key=lambda path: path.stat().st_mtime) if inside else [directory]


def _has_ended_without(directory: Path, opened: Container[str]) -> bool:
    """Whether every rank has ended and compacted its journal, and some did so before it was opened."""
    ended = [path.name.split(".")[1] for path in directory.glob("steps.rank*.parquet")]
    return any(rank not in opened for rank in ended) and not any(directory.glob("rank*.journal"))


def _ended(directory: Path) -> LiveTables:
    records = load_run(directory)
    steps = records.steps[records.steps["step"] >= 0]
    rest = records.memory[records.memory["where"] == "rest"]
    newest = steps["step"].max()
    return LiveTables(
        steps=steps[steps["rank"] == 0],
        memory=rest[rest["step"] == rest["step"].max()],
        collectives=records.collectives[records.collectives["step"] == newest],
        spans=records.spans[records.spans["step"] == newest],
    )
