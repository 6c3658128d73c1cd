"""A live view of a run: loss, time of a step, memory by role, and the timeline of the newest step.

    with live("runs/first"):
        compare(config, "runs/first")

A thread reads the records as they grow, and replaces the figures about twice a second; less often where reading and
drawing would take more than a fifth of a core, as after some thousand steps. The ranks are not involved, and on Linux
they have priority; if no core is idle their steps still become a few percent longer. The view can also watch a run of
another process, for example one started in a terminal.
"""

import os
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Self

from ipywidgets import VBox

from shardlab.course.widgets.panel import Message, Panel, Picture
from shardlab.plots import collective_timeline, training_progress
from shardlab.plots.theme import nothing
from shardlab.records.store import Records, load_runs, run_directories, whole_steps
from shardlab.records.tables import TABLES
from shardlab.vocabulary import Role

EVERY_S = 0.45
SHARE = 0.2  # of a core, at most
LOWEST_PRIORITY = 19
TIMELINE = "Timeline of the newest step"


def live(directory: Path | str) -> "LiveView":
    """A live view of what is run in a directory, updated inside a ``with`` block, or until ``stop()``.

    In a script ``read_progress`` gives the same as tables.

    Args:
        directory: where ``compare`` writes, or that of one run; it need not exist yet.

    Raises:
        TypeError: something else than a directory is given.
    """
    if not isinstance(directory, str | Path):
        raise TypeError(f"live: {directory!r:.60} is given; give the directory in which compare(...) writes")
    return LiveView(directory)


class LiveView(Panel):
    """The panel of ``live``. As the last line of a cell it starts to watch and returns at once.

    Args:
        directory: see ``live``.
        curves, timeline, message: parts of a larger panel to update, instead of own ones.
        num_steps: of a run, for a bar beside the message.
    """

    def __init__(
        self, directory: Path | str, *, curves: Picture | None = None, timeline: Picture | None = None,
        message: Message | None = None, num_steps: int | None = None,
    ) -> None:  # fmt: skip
        self.progress: Records | None = None
        self.message = message or Message("Waiting for the first step.")
        self.curves = curves or Picture(nothing("Training", "no step has ended yet"))
        self.timeline = timeline or Picture(nothing(TIMELINE, "no step has ended yet"))
        self._directory, self._began, self._num_steps = directory, monotonic(), num_steps
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
            self._thread.join()

    def update(self, *, final: bool = False) -> None:
        """Read the records and, if there are new steps, replace the figures."""
        progress = read_progress(self._directory)
        steps = progress.steps
        if not len(steps) and not final:
            self.message.say(f"Waiting for the first step, {monotonic() - self._began:.0f} s.", 0.0)
        if not len(steps) or (not final and self.progress is not None and len(self.progress.steps) == len(steps)):
            return
        self.progress, last = progress, steps.iloc[-1]
        held = progress.memory[progress.memory["role"] != Role.UNATTRIBUTED]  # what the strategy holds
        self.curves.replace(training_progress(steps[steps["rank"] == 0], held), final=final)
        if (progress.spans["run"] == last["run"]).any():
            figure = collective_timeline(
                progress.collectives, progress.spans, run=str(last["run"]), step=int(last["step"])
            )
            self.timeline.replace(figure, final=final)
        done = (last["step"] + 1) / self._num_steps if self._num_steps and not final else None
        self.message.say(f"{'Ended' if final else 'Running'}: {last['run']}, step {last['step']}.", done)

    def __enter__(self) -> Self:
        self._ipython_display_()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ipython_display_(self) -> None:
        super()._ipython_display_()
        self.start()

    def _watch(self) -> None:
        if sys.platform == "linux":  # only there a thread has its own priority; the ranks must not wait for this one
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            took = 0.0
            while not self._ended.wait(max(EVERY_S, took / SHARE - took)):
                began = monotonic()
                self.update()
                took = monotonic() - began
            self.update(final=True)
        except ValueError as error:  # a damaged record must not end the training that is watched
            self.message.fail(str(error))


def read_progress(directory: Path | str) -> Records:
    """The steps that all ranks have finished of the runs in ``directory``, the current run last; empty without any.

    Args:
        directory: where ``compare`` writes, or the directory of one run; it need not exist yet.

    Raises:
        ValueError: a record is damaged, or has another format.
    """
    directory = Path(directory)
    try:
        begun = run_directories(directory)
    except ValueError:  # there is none
        return Records(**{name: table.frame([]) for name, table in TABLES.items()}, manifests={})
    try:
        newest_last = sorted(begun, key=lambda run: run.stat().st_mtime)
        return whole_steps(load_runs(newest_last))
    except FileNotFoundError:  # a rank has just removed its journal, which now stands in tables
        return read_progress(directory)
