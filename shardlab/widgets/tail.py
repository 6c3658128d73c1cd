"""What a run has written so far, read while it goes on: only what is new is read, and only a little of it is parsed.

Rank 0's lines are read whole, for the loss and the times; of the other ranks only the last two, for the timeline of the
newest step that every rank has finished. Watching takes nothing from the ranks but the cores it shares with them.
"""

import json
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.tables import COLLECTIVES, KEYS, MEMORY, SPANS, STEPS, Table
from shardlab.trace.store import load_run

Line = dict[str, Any]
KEPT_LINES = 2  # a rank is never more than one step ahead of another: the loss is a collective
MAX_STEPS = 5000  # of one run; beyond, every other one is forgotten
KEY_NAMES = tuple(column.name for column in KEYS)


@dataclass(frozen=True)
class LiveTables:
    """What is known of one run, or of the runs in a directory.

    Attributes:
        steps: table ``steps`` of rank 0.
        memory: table ``memory``: of each run the last sample at rest of every rank.
        collectives: of the newest step that all ranks of the newest run have finished.
        spans: of the same step.
    """

    steps: pd.DataFrame
    memory: pd.DataFrame
    collectives: pd.DataFrame
    spans: pd.DataFrame


def read_progress(directory: Path | str) -> LiveTables:
    """What the runs in ``directory`` have written so far; empty tables where that is nothing.

    Args:
        directory: where ``compare`` writes, or the directory of one run; it need not be there yet.

    Raises:
        ValueError: a record is damaged, or of a newer format.
    """
    tail = DirectoryTail(directory)
    try:
        return tail.read()
    finally:
        tail.close()


class DirectoryTail:
    """Follows all runs that a comparison writes into a directory, or the one run of a run's directory."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._runs: dict[Path, RunTail] = {}
        self._progress: LiveTables | None = None

    def read(self) -> LiveTables:
        """Read what is new; everything known so far.

        Raises:
            ValueError: a record is damaged, or of a newer format.
        """
        for directory in _run_directories(self.directory):
            if directory not in self._runs:
                self._runs[directory] = RunTail(directory)
        before = [run.progress for run in self._runs.values()]
        runs = [run.read() for run in self._runs.values()]
        if self._progress is not None and all(one is other for one, other in zip(before, runs, strict=True)):
            return self._progress  # the same object: there is nothing to draw
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
    """Follows the files of one run. What was read of a file stays readable when the run has ended and removed it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, BufferedReader] = {}
        self._lines: dict[str, deque[Line]] = {}  # of each rank the last ones
        self._rest: dict[str, Line] = {}  # of each rank the last one with a sample at rest
        self._steps: list[Line] = []  # of rank 0
        self.progress = LiveTables(*(table.frame([]) for table in (STEPS, MEMORY, COLLECTIVES, SPANS)))
        """What was known when it was last read."""

    def read(self) -> LiveTables:
        """Read what is new; everything known so far, the same object if nothing is new."""
        for path in sorted(self.directory.glob("rank*.jsonl")):
            if path.stem not in self._files:
                with suppress(FileNotFoundError):  # it ended this very moment
                    self._files[path.stem] = path.open("rb")
        if "rank0" not in self._files and not len(self.progress.steps) and _has_ended(self.directory):
            self.progress = _ended(self.directory)  # before anybody looked
        new = {name: _new_lines(file) for name, file in self._files.items()}
        if not any(new.values()):
            return self.progress
        for name, lines in new.items():
            self._take(name, lines)
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
        for file in self._files.values():
            file.close()

    def _take(self, name: str, new: list[bytes]) -> None:
        for text in new if name == "rank0" else new[-KEPT_LINES:]:
            line = _parsed(text, self.directory / f"{name}.jsonl")
            if STEPS.name not in line:
                continue  # what was sent before the first step, or the shards after the last
            self._lines.setdefault(name, deque(maxlen=KEPT_LINES)).append(line)
            if "rest" in line.get(MEMORY.name, {}).get("where", ()):
                self._rest[name] = line
            if name == "rank0":
                self._steps.append({key: line[key] for key in (*KEY_NAMES, STEPS.name)})
        if len(self._steps) > MAX_STEPS:
            self._steps = self._steps[::2]

    def _latest(self) -> list[Line]:
        """Every rank's line of the newest step that all have finished."""
        if not self._lines or len(self._lines) < len(self._files):
            return []
        common = set.intersection(*({line["step"] for line in lines} for lines in self._lines.values()))
        return [line for lines in self._lines.values() for line in lines if common and line["step"] == max(common)]


def _new_lines(file: BufferedReader) -> list[bytes]:
    """Whole lines since the last look; half a line stays for the next."""
    start = file.tell()
    text = file.read()
    end = text.rfind(b"\n") + 1
    file.seek(start + end)
    return text[:end].splitlines()


def _parsed(text: bytes, path: Path) -> Line:
    try:
        line: Line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"run: {path} is damaged: {error}") from error
    return line


def _table(lines: Iterable[Line], table: Table) -> pd.DataFrame:
    """The rows of one table in some lines."""
    columns: dict[str, list[Any]] = {name: [] for name in table.column_names}
    for line in lines:
        values = line.get(table.name)
        if values is not None:
            count = len(next(iter(values.values())))
            for name, column in columns.items():
                column += [line[name]] * count if name in KEY_NAMES else values[name]
    # A memory table holds samples inside the step too; only what is held at rest is asked for here.
    frame = table.frame(pd.DataFrame(columns, dtype=object))
    return frame[frame["where"] == "rest"] if table is MEMORY else frame


def _joined(table: Table, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    some = [frame for frame in frames if len(frame)]
    return pd.concat(some, ignore_index=True) if some else table.frame([])


def _run_directories(directory: Path) -> list[Path]:
    """Of a comparison those of its runs, the one that goes on last; else the directory itself."""
    inside = [path for path in (directory / "records").glob("*") if path.is_dir()]
    return sorted(inside, key=lambda path: path.stat().st_mtime) if inside else [directory]


def _has_ended(directory: Path) -> bool:
    """Whether every rank has turned its lines into compact files."""
    return any(directory.glob("steps.rank*.parquet")) and not any(directory.glob("rank*.jsonl"))


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
