"""A workbench: choose model, strategy, ranks, bucket size, link and precision; run; watch; compare with earlier runs.

A run is driven by a thread of this process, so that the controls stay responsive and Stop works; the ranks are separate
processes, as always. Errors in the choices are shown beside the controls, never as a traceback.
"""

import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
from ipywidgets import (
    Button,
    Dropdown,
    FloatText,
    HBox,
    IntText,
    Layout,
    Text,
    ValueWidget,
    VBox,
)

from shardlab.engines import STRATEGIES, engine_options
from shardlab.experiment import CompareConfig
from shardlab.models import MODELS
from shardlab.plots.theme import nothing
from shardlab.widgets.history import RunHistory, label
from shardlab.widgets.live import LiveView
from shardlab.widgets.overlays import VIEWS, overlay
from shardlab.widgets.panel import Message, Panel, Picture

CHOOSE = "Choose, then press Run."
DEFAULTS = CompareConfig(strategies=("zero1",), ranks=2, steps=20, text="grammar")
STYLE: dict[str, str] = {"description_width": "7em"}
# Controls that only some strategies take: field of the configuration -> option of the engine.
OPTIONAL = {"bucket_mib": "bucket_bytes", "precision": "precision", "sharding": "sharding"}
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "precision": ("full", "bf16", "fp16"),
    "sharding": ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"),
}


def workbench(directory: Path | str | None = None, config: CompareConfig | None = None) -> "Workbench":
    """Controls for a run, Run and Stop, the live view, and a table and figures of all runs so far.

    In a script ``RunHistory`` does the same.

    Args:
        directory: where runs are written, and earlier ones are found; None for a temporary directory.
        config: initial values of the controls; None for ZeRO-1 with a GPT of 1 M parameters on 2 ranks.
    """
    return Workbench(RunHistory(directory), config or DEFAULTS)


class Workbench(Panel):
    """The panel of ``workbench``.

    Attributes:
        history: all runs.
        message: the state of the run, or an error.
    """

    def __init__(self, history: RunHistory, config: CompareConfig) -> None:
        self.history = history
        self._base = config
        self.message = Message(CHOOSE)
        self.inputs = _inputs(config)
        self.run_button = Button(description="Run", icon="play", button_style="primary")
        self.stop_button = Button(description="Stop", icon="stop", disabled=True)
        self.view = Dropdown(options=list(VIEWS), description="picture", style=STYLE)
        self.about = Dropdown(options=[], description="run", style=STYLE)
        self.table = Picture(pd.DataFrame({"run": []}))
        self.upper = Picture(nothing("Runs", "nothing has been run yet"))
        self.lower = Picture(nothing("Timeline of the newest step", "nothing has been run yet"))
        self._thread: threading.Thread | None = None
        self._is_filling = False  # the list of runs is being replaced, and its events must not draw
        self._is_live = False  # the figures belong to the current run
        self._is_wrong = False  # the message shows an error of the controls
        self.inputs["strategies"].observe(lambda _: self._show_what_counts(), names="value")
        for control in self.inputs.values():
            control.observe(lambda _: self._checked(), names="value")
        self.view.observe(lambda _: self._draw(), names="value")
        self.about.observe(lambda _: self._draw(), names="value")
        self.run_button.on_click(lambda _: self.start())
        self.stop_button.on_click(lambda _: self.stop())
        self._show_what_counts()
        self._show_runs()
        super().__init__(self._box(), (self.table, self.upper, self.lower), "workbench: choose, run, watch, compare")

    def config(self) -> CompareConfig:
        """The configuration for the values of the controls.

        Raises:
            ValueError: the values are invalid.
        """
        said = {name: control.value for name, control in self.inputs.items() if not control.disabled}
        said |= {"strategies": (said["strategies"],), "link": said["link"].strip() or None}
        kept = {
            field.name: getattr(self._base, field.name)
            for field in fields(CompareConfig)
            if field.name not in self.inputs
        }
        return CompareConfig(**(kept | said))

    def start(self) -> None:
        """Run the configuration of the controls in a thread, as the Run button does. Errors are shown, not raised."""
        if self.is_running:
            return
        if (config := self._checked()) is None:
            return
        self._thread = threading.Thread(
            target=self._run_and_tell, args=(config,), name="shardlab-workbench", daemon=True
        )
        self._set_running(True)  # before the thread, which says at its end that nothing runs
        self._thread.start()

    def run(self, **changes: Any) -> int:
        """Set some controls, run, wait until the run is over, and return its number.

        Args:
            changes: fields of ``CompareConfig`` that have controls; ``strategies`` is one name.

        Raises:
            ValueError: there is no such control, or the values are invalid.
        """
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
        for name, value in changes.items():
            if name not in self.inputs:
                raise ValueError(f"{name}: there is no such control; there are {', '.join(self.inputs)}")
            control = self.inputs[name]
            if isinstance(control, Dropdown) and value not in control.options:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(control.options)}")
            control.value = value

    def stop(self) -> None:
        """End the current run, as the Stop button does. Its records so far stay on disk."""
        if self.is_running:
            self.message.say("Stopping.")
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
        except ValueError as error:
            self._is_wrong = True
            self.message.fail(str(error))
            return None
        if self._is_wrong:
            self._is_wrong = False
            self.message.say(CHOOSE)
        return config

    def _run_and_tell(self, config: CompareConfig) -> None:
        """Body of the thread. An error is shown in one line, because a traceback of a thread would not be seen."""
        try:
            self._run(config)
        except KeyboardInterrupt:
            self.message.say("Stopped. The records so far are kept.")
        except Exception as error:
            self.message.fail(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        finally:
            self._set_running(False)

    def _run(self, config: CompareConfig) -> int:
        directory = self.history.next_directory()
        self.message.say(f"Starting {config.ranks} {'rank' if config.ranks == 1 else 'ranks'}.")
        view = LiveView(directory, curves=self.upper, timeline=self.lower, message=self.message).start()
        self._is_live = True
        try:
            number = self.history.run(config, directory=directory)
        finally:
            view.stop()
            self._is_live = False
        self._show_runs(label(number, config.strategies[-1]))
        summary = self.history.comparisons[number].summary.iloc[-1]
        self.message.say(
            f"Run {number} is over: {summary['strategy']}, {summary['step_ms']:.1f} ms a step, last loss "
            f"{summary['loss_last']:.4f}. Its records are in {directory.name}."
        )
        return number

    def _show_runs(self, about: str | None = None) -> None:
        """Offer all runs, and draw the table and the chosen figure."""
        labels = self.history.labels()
        if not labels:
            return
        self._is_filling = True
        self.about.options, self.about.value = labels, about or labels[-1]
        self._is_filling = False
        self.table.replace(self.history.table(), final=True)
        self._draw()

    def _draw(self) -> None:
        if self._is_filling or self._is_live or not self.history.comparisons:
            return
        try:
            figure = overlay(self.history, str(self.view.value), str(self.about.value))
        except ValueError as error:  # for example a run whose memory was not traced
            figure = nothing(str(self.view.value), str(error))
        self.upper.replace(figure, final=True)

    def _set_running(self, running: bool) -> None:
        self.run_button.disabled, self.stop_button.disabled = running, not running

    def _show_what_counts(self) -> None:
        """Disable the controls that the chosen strategy does not take."""
        taken = engine_options(str(self.inputs["strategies"].value))
        for name, option in OPTIONAL.items():
            self.inputs[name].disabled = option not in taken

    def _box(self) -> VBox:
        columns = (
            ("strategies", "model", "ranks"), ("steps", "bucket_mib", "precision"), ("sharding", "link", "device"),
        )  # fmt: skip
        rows = HBox(
            [VBox([self.inputs[name] for name in column]) for column in columns], layout=Layout(flex_flow="row wrap")
        )
        buttons = HBox([self.run_button, self.stop_button, self.view, self.about], layout=Layout(flex_flow="row wrap"))
        return VBox([rows, buttons, self.message.widget])


def _inputs(config: CompareConfig) -> dict[str, ValueWidget]:
    """A control for each field that can be chosen, by the name of the field."""

    def choice(name: str, options: Any, value: Any, words: str = "") -> Dropdown:
        return Dropdown(options=list(options), value=value, description=words or name, style=STYLE)

    def entry(kind: Callable[..., ValueWidget], name: str, value: Any, words: str = "", **more: Any) -> ValueWidget:
        return kind(value=value, description=words or name, style=STYLE, **more)

    return {
        "strategies": choice("strategies", STRATEGIES, config.strategies[0], "strategy"),
        "model": choice("model", MODELS, config.model),
        "ranks": entry(IntText, "ranks", config.ranks),
        "steps": entry(IntText, "steps", config.steps),
        "bucket_mib": entry(FloatText, "bucket_mib", config.bucket_mib, "bucket (MiB)"),
        "precision": choice("precision", CHOICES["precision"], config.precision),
        "sharding": choice("sharding", CHOICES["sharding"], config.sharding),
        "link": entry(Text, "link", config.link or "", placeholder="real; or 10Gbps,50us"),
        "device": choice("device", CHOICES["device"], config.device),
    }
