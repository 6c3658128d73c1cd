"""A workbench: choose what is trained, how and by how many ranks; run; watch; compare with earlier runs.

    workbench(workload)                                     # your model, your data, your loss
    workbench(CompareConfig(model="gpt-3m"), "runs/play")   # a built-in model; runs are kept, and found again

A run is driven by a thread of this process, so that the controls stay responsive and Stop works; the ranks are separate
processes, as always. Errors in the choices are shown beside the controls, never as a traceback.
"""

import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from ipywidgets import HTML, Button, Dropdown, HBox, Layout, VBox
from torch import nn

from shardlab import plots
from shardlab.course.widgets.choices import STYLE, Choices
from shardlab.course.widgets.history import RunHistory
from shardlab.course.widgets.live import LiveView
from shardlab.course.widgets.panel import Message, Panel, Picture
from shardlab.course.widgets.views import VIEWS
from shardlab.experiment import CompareConfig, Workload
from shardlab.experiment.comparison import configured
from shardlab.installed import data_path
from shardlab.plots.theme import nothing

CHOOSE = "Choose, then press Run."
FIRST: dict[str, Any] = {"strategies": "zero1", "ranks": 2, "steps": 20}


def workbench(
    what: CompareConfig | Workload | Callable[[], nn.Module] | Path | str | None = None,
    *rest: Any,
    directory: Path | str | None = None,
    **options: Any,
) -> "Workbench":
    """Controls for a run, Run and Stop, the live view, and a table and figures of all runs so far.

    In a script ``RunHistory`` does the same.

    Args:
        what: as of ``compare``: a workload, a function that makes the model (data and loss follow), or a whole
            configuration. None, or the directory alone, for a built-in GPT of 1 M parameters.
        rest: as of ``compare``.
        directory: where runs are written, and earlier ones are found; None for a temporary directory.
        options: fields of ``CompareConfig``, the initial values of the controls: by default ZeRO-1 on 2 ranks.

    Raises:
        ValueError, TypeError: as ``compare``.
    """
    first = options if isinstance(what, CompareConfig) else FIRST | options
    if what is None or isinstance(what, str | Path):
        rest, what, first = (() if what is None else (what,)) + rest, CompareConfig(**{"text": "grammar"} | first), {}
    config, where = configured(what, rest, directory, first, "workbench")
    return Workbench(RunHistory(where), config)


class Workbench(Panel):
    """The panel of ``workbench``.

    Attributes:
        history: all runs.
        inputs: the controls, by the name of their option.
        message: the state of the run, or an error.
    """

    def __init__(self, history: RunHistory, config: CompareConfig) -> None:
        self.history = history
        self.message = Message(CHOOSE)
        self.choices = Choices(config)
        self.inputs = self.choices.inputs
        self.run_button = Button(description="Run", icon="play", button_style="primary")
        self.stop_button = Button(description="Stop", icon="stop", disabled=True)
        self.view = Dropdown(options=list(VIEWS), description="picture", style=STYLE, layout=Layout(width="26em"))
        self.about = Dropdown(options=[], description="run", style=STYLE)
        self.table = Picture(pd.DataFrame())
        self.lines = HTML()
        self.upper, self.lower = map(Picture, _examples())
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()  # of the current run, which its thread may not have begun yet
        self._is_filling = False  # the list of runs is being replaced, and its events must not draw
        self._is_live = False  # the figures belong to the current run
        self._is_wrong = False  # the message shows an error of the controls
        for control in self.inputs.values():
            control.observe(lambda _: self._checked(), names="value")
        self.view.observe(lambda _: self._draw(), names="value")
        self.about.observe(lambda _: self._draw(), names="value")
        self.run_button.on_click(lambda _: self.start())
        self.stop_button.on_click(lambda _: self.stop())
        self._show_runs()
        super().__init__(self._box(), (self.table, self.upper, self.lower), "workbench: choose, run, watch, compare")

    def config(self) -> CompareConfig:
        """The configuration for the values of the controls.

        Raises:
            ValueError, TypeError: ``compare`` refuses the values, for the same reasons.
        """
        return self.choices.config()

    def start(self) -> None:
        """Run the configuration of the controls in a thread, as the Run button does. Errors are shown, not raised."""
        if self.is_running or (config := self._checked()) is None:
            return
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_and_tell, args=(config,), daemon=True)
        self._set_running(True)  # before the thread, which says at its end that nothing runs
        self._thread.start()

    def run(self, **changes: Any) -> int:
        """Set some controls, run, wait until the run is over, and return its number.

        Args:
            changes: fields of ``CompareConfig`` that have controls; ``strategies`` is one name.

        Raises:
            ValueError: there is no such control, or the values are invalid.
            RuntimeError: there is a current run.
        """
        if self.is_running:
            raise RuntimeError("workbench: a run goes on; wait for it, by wait(), or end it, by stop()")
        self._stopping = threading.Event()
        self.choose(**changes)
        config = self.config()
        self._set_running(True)
        try:
            return self._run(config)
        finally:
            self._set_running(False)

    def choose(self, **changes: Any) -> None:
        """Set controls, as a user would.

        Raises:
            ValueError: there is no such control, or it does not offer that value.
        """
        self.choices.choose(changes)

    def stop(self) -> None:
        """End the current run, as the Stop button does. It joins the others with the steps that it has finished."""
        if self.is_running:
            self.message.say("Stopping.")
            self._stopping.set()
            self.history.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the current run, and return whether it is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether there is a current run."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the current run and the warm ranks, and delete temporary records."""
        self.stop()
        self.wait()
        self.history.close()

    def _checked(self) -> CompareConfig | None:
        """The configuration of the controls, or None; then the message shows the error until it is fixed."""
        try:
            config = self.config()
        except (ValueError, TypeError) as error:
            self._is_wrong = True
            self.message.fail(str(error))
            return None
        if self._is_wrong:
            self._is_wrong = False
            self.message.say(CHOOSE)
        return config

    def _run_and_tell(self, config: CompareConfig) -> None:
        """Body of the thread. An error is shown in one line, because a traceback of a thread would not be seen."""
        before = len(self.history.runs)
        try:
            self._run(config)
        except KeyboardInterrupt:
            said = "The run was stopped before a step was finished."
            for number, run in list(self.history.runs.items())[before:]:
                done = int(run.comparison.summary["steps"].iloc[-1])
                said = f"Run {number} was stopped after {done} {'step' if done == 1 else 'steps'}, which are kept."
            self.message.say(said)
        except Exception as error:
            self.message.fail(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        finally:
            self._set_running(False)

    def _run(self, config: CompareConfig) -> int:
        directory = self.history.next_directory()
        self.message.say(f"Starting {config.ranks} {'rank' if config.ranks == 1 else 'ranks'}.")
        parts: dict[str, Any] = {"curves": self.upper, "timeline": self.lower, "message": self.message}
        view = LiveView(directory, **parts, num_steps=config.steps).start()
        self._is_live = True
        try:
            number = self.history.run(config, directory=directory, stopping=self._stopping)
        finally:  # also if it was stopped or has failed: then the table says so
            view.stop()
            self._is_live = False
            self._show_runs()
        summary = self.history.runs[number].comparison.summary.iloc[-1]
        self.message.say(
            f"Run {number} is over: {summary['strategy']}, {summary['step_ms']:.1f} ms a step, last loss "
            f"{summary['loss_last']:.4f}. Its records are in {directory.name}."
        )
        return number

    def _show_runs(self) -> None:
        """Offer all runs, and draw the table and the chosen figure."""
        if self.history.runs:
            self.table.replace(self.history.table(), final=True)
            said = (f"<b>{name}</b> {escape(text)}" for name, text in self.history.answer())
            self.lines.value = f'<div style="line-height:1.5">{"<br>".join(said)}</div>'
        if labels := self.history.labels():
            self._is_filling = True
            self.about.options, self.about.value = labels, labels[-1]
            self._is_filling = False
            self._draw()

    def _draw(self) -> None:
        if self._is_filling or self._is_live or not self.history.runs:
            return
        try:
            figure = VIEWS[self.view.value](self.history, self.about.value)
        except ValueError as error:  # for example a run whose memory was not traced
            figure = nothing(str(self.view.value), str(error))
        self.upper.replace(figure, final=True)

    def _set_running(self, running: bool) -> None:
        self.run_button.disabled, self.stop_button.disabled = running, not running

    def _box(self) -> VBox:
        row = [self.run_button, self.stop_button, self.view, self.about]
        buttons = HBox(row, layout=Layout(flex_flow="row wrap", margin="0.6em 0 0 0"))
        return VBox([self.choices.box(), buttons, self.message.widget, self.lines])


def _examples() -> tuple[go.Figure, go.Figure]:
    """A recorded run, to look at before the first one: what strategies hold, and a step of FSDP."""
    memory, moved, worked = (
        pd.read_parquet(data_path("front_page") / f"{name}.parquet") for name in ("memory", "collectives", "spans")
    )
    figures = plots.memory_by_role(memory), plots.collective_timeline(moved, worked, run="fsdp")
    for figure in figures:
        figure.update_layout(title_text=f"An example: {figure.layout.title.text}")
    return figures
