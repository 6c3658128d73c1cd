"""A live view of a run: loss, time of a step, memory by role, and the timeline of the newest step.

    comparison = live(workload, strategies=("bucketed", "fsdp"), ranks=2).comparison     # as compare, and watched
    with live("runs/first"):                                                             # watch what another call runs
        compare(config, "runs/first")

A thread reads what the ranks append to their records, and replaces the figures about twice a second. The timeline is
more expensive to draw, so it is redrawn less often if it would take more than a fifth of a core. The ranks are not
involved, and on Linux they have priority; if no core is idle their steps still become a few percent longer. The view
can also watch a run of another process, for example one started in a terminal.

Only new entries of a record are read, and only a few of them decoded: all of rank 0, for losses and times, but only the
last two of other ranks, for the timeline of the newest step that every rank has finished.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Self

import pandas as pd
from IPython.core.getipython import get_ipython
from ipywidgets import VBox
from torch import nn

from shardlab.course.widgets.panel import Message, Panel, Picture
from shardlab.experiment import CompareConfig, Comparison, Workload, compare, new_directory
from shardlab.experiment.comparison import configured
from shardlab.launch import RankPool
from shardlab.plots import collective_timeline, training_progress
from shardlab.plots.theme import nothing
from shardlab.tables import COLLECTIVES, MEMORY, SPANS, STEPS, Table
from shardlab.trace.entries import Columns, EntryStream, joined
from shardlab.trace.store import load_run
from shardlab.vocabulary import Phase

EVERY_S = 0.45
TIMELINE_SHARE = 0.2  # of a core, at most
LOWEST_PRIORITY = 19
TIMELINE = "Timeline of the newest step"
Tables = Mapping[str, Columns]
"""The tables of one entry: one step of one rank."""
KEPT = 2  # a rank is never more than one step ahead of another: the loss is a collective
MAX_STEPS = 5000  # of one run; beyond, every other step is dropped


def live(
    what: CompareConfig | Workload | Callable[[], nn.Module] | Path | str, *rest: Any, directory: Path | str | None =
    None, pool: RankPool | None = None, **options: Any,
) -> "LiveView":  # fmt: skip
    """``compare`` with a live view of its runs; or, of a directory, a live view of what another call runs there.

    In a script ``read_progress`` gives the same as tables.

    Args:
        what, rest, directory, pool, options: as of ``compare``, which is called and watched until it is over; the
            result is ``comparison`` of the view. Or only a directory: where ``compare`` writes, or that of one run; it
            need not exist yet. That view is updated inside a ``with`` block, or until ``stop()``.

    Raises:
        ValueError, TypeError, RankError: as ``compare``.
    """
    if isinstance(what, str | Path):
        if rest or directory or pool or options:
            raise TypeError(f"live: {str(what)!r} is watched, and nothing is run; leave the other arguments out")
        return LiveView(what)
    config, found = configured(what, rest, directory, options, "live", pool)
    found = found or new_directory()
    with LiveView(found) as view:
        view.comparison = compare(config, found, pool=pool)
    return view


class LiveView(Panel):
    """The panel of ``live``. As the last line of a cell it starts to watch and returns at once.

    Args:
        directory: see ``live``.
        curves, timeline, message: parts of a larger panel to update, instead of own ones.
        num_steps: of a run, for a bar beside the message.

    Attributes:
        comparison: what ``live`` has run; None if it only watches.
    """

    def __init__(
        self, directory: Path | str, *, curves: Picture | None = None, timeline: Picture | None = None,
        message: Message | None = None, num_steps: int | None = None,
    ) -> None:  # fmt: skip
        self.comparison: Comparison | None = None
        self.progress: LiveTables | None = None
        self.num_updates = 0
        self.message = message or Message("Waiting for the first step.")
        self.curves = curves or Picture(nothing("Training", "no step has ended yet"))
        self.timeline = timeline or Picture(nothing(TIMELINE, "no step has ended yet"))
        self._tail = DirectoryTail(directory)
        self._timeline_due, self._began, self._num_steps = 0.0, monotonic(), num_steps
        self._cell: int | None = None  # the cell in which it is shown
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(VBox([self.message.widget]), (self.curves, self.timeline), "live view of a run")

    def start(self) -> Self:
        """Watch in a thread of this process; starting twice has no effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="shardlab-live", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Read once more, show the final state, and end the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # it closes the files it reads, so they are closed when this returns

    def update(self, *, final: bool = False) -> bool:
        """Read new records and, if there are any, replace the figures; return whether there were any."""
        progress = self._tail.read()
        is_new = progress is not self.progress and len(progress.steps) > 0
        if not is_new and not final:
            if not len(progress.steps):
                self.message.say(f"Waiting for the first step, {monotonic() - self._began:.0f} s.", 0.0)
            return False
        self.progress = progress
        if len(progress.steps):
            self.num_updates += 1
            self.curves.replace(training_progress(progress.steps, progress.memory), final=final)
            if final or monotonic() >= self._timeline_due:
                began = monotonic()
                moved = progress.collectives[progress.collectives["phase"] != Phase.METRICS]
                if len(progress.spans):
                    self.timeline.replace(collective_timeline(moved, progress.spans), final=final)
                self._timeline_due = began + (monotonic() - began) / TIMELINE_SHARE
            last = progress.steps.iloc[-1]
            done = (last["step"] + 1) / self._num_steps if self._num_steps and not final else None
            self.message.say(f"{'Ended' if final else 'Running'}: {last['run']}, step {last['step']}.", done)
        return is_new

    def __enter__(self) -> Self:
        self._ipython_display_()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ipython_display_(self) -> None:
        cell = getattr(get_ipython(), "execution_count", None)
        if cell is None or cell != self._cell:  # else it stands in this cell already, from before the run
            super()._ipython_display_()
        self._cell = cell
        self.start()

    def _watch(self) -> None:
        if sys.platform == "linux":  # only there a thread has its own priority; the ranks must not wait for this one
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            due = monotonic()
            while not self._ended.wait(max(0.0, due - monotonic())):
                due = monotonic() + EVERY_S
                self.update()
            self.update(final=True)
        except ValueError as error:  # a damaged record must not end the training that is watched
            self.message.fail(str(error))
        finally:
            self._tail.close()


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
    with closing(DirectoryTail(directory)) as tail:
        return tail.read()


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
        journals = any(self.directory.glob("rank*.journal"))
        ended = [path.name.split(".")[1] for path in self.directory.glob("steps.rank*.parquet")]
        if not self._was_missed and not journals and any(rank not in self._streams for rank in ended):
            self.progress, self._was_missed = _ended(self.directory), True
        if self._was_missed or not sum(self._take(name, stream) for name, stream in self._streams.items()):
            return self.progress
        latest = self._latest()
        self.progress = LiveTables(
            _table(self._steps, STEPS), _table(self._rest.values(), MEMORY), _table(latest, COLLECTIVES),
            _table(latest, SPANS),
        )  # fmt: skip
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
    return int(tables[STEPS.name]["step"][0])


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


def _ended(directory: Path) -> LiveTables:
    """Of a run whose ranks have all compacted their journals, one of them before it was opened."""
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
