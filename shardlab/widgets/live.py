"""A live view of a run: loss, time of a step, memory by role, and the timeline of the newest step.

    comparison = live(workload, strategies=("bucketed", "fsdp"), ranks=2).comparison     # as compare, and watched
    with live("runs/first"):                                                             # watch what another call runs
        compare(config, "runs/first")

A thread reads what the ranks append to their records, and replaces the figures about twice a second. The timeline is
more expensive to draw, so it is redrawn less often if it would take more than a fifth of a core. The ranks are not
involved, and on Linux they have priority; if no core is idle their steps still become a few percent longer. The view
can also watch a run of another process, for example one started in a terminal.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from IPython.core.getipython import get_ipython
from ipywidgets import VBox
from torch import nn

from shardlab.experiment import CompareConfig, Comparison, Workload, compare, new_directory
from shardlab.experiment.comparison import configured
from shardlab.launch import RankPool
from shardlab.plots import collective_timeline, training_progress
from shardlab.plots.theme import nothing
from shardlab.vocabulary import Phase
from shardlab.widgets.live_tables import DirectoryTail, LiveTables
from shardlab.widgets.panel import Message, Panel, Picture

EVERY_S = 0.45
TIMELINE_SHARE = 0.2  # of a core, at most
LOWEST_PRIORITY = 19
TIMELINE = "Timeline of the newest step"


def live(
    what: CompareConfig | Workload | Callable[[], nn.Module] | Path | str,
    *rest: Any,
    directory: Path | str | None = None,
    pool: RankPool | None = None,
    **options: Any,
) -> "LiveView":
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

    Attributes:
        comparison: what ``live`` has run; None if it only watches.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        curves: Picture | None = None,
        timeline: Picture | None = None,
        message: Message | None = None,
    ) -> None:
        self.comparison: Comparison | None = None
        self.progress: LiveTables | None = None
        self.num_updates = 0
        self.message = message or Message("Waiting for the first step.")
        self.curves = curves or Picture(nothing("Training", "no step has ended yet"))
        self.timeline = timeline or Picture(nothing(TIMELINE, "no step has ended yet"))
        self._tail = DirectoryTail(directory)
        self._timeline_due = 0.0
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
            return False
        self.progress = progress
        if len(progress.steps):
            self.num_updates += 1
            self.curves.replace(training_progress(progress.steps, progress.memory), final=final)
            if final or monotonic() >= self._timeline_due:
                began = monotonic()
                self._draw_timeline(progress, final=final)
                self._timeline_due = began + (monotonic() - began) / TIMELINE_SHARE
            run, step = _newest(progress)
            self.message.say(f"{'Ended' if final else 'Running'}: {run}, step {step}.")
        return is_new

    def __enter__(self) -> Self:
        self._ipython_display_()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _ipython_display_(self) -> None:
        cell = getattr(get_ipython(), "execution_count", None)
        if cell is None or cell != self._cell:  # else it stands in this cell already, from before the run
            super()._ipython_display_()
        self._cell = cell
        self.start()

    def _draw_timeline(self, progress: LiveTables, *, final: bool) -> None:
        moved = progress.collectives[progress.collectives["phase"] != Phase.METRICS]
        if len(progress.spans):
            self.timeline.replace(collective_timeline(moved, progress.spans), final=final)

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


def _newest(progress: LiveTables) -> tuple[str, int]:
    last = progress.steps.iloc[-1]
    return str(last["run"]), int(last["step"])
