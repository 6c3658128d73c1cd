"""The controls of the workbench: one for each option that the course changes, and which of them count when.

A control counts if the chosen strategy takes its option and the chosen model leaves it open; the others are disabled,
and their options have their defaults. The batch is a number from the start, so that it stays what it was when ranks
change; only an empty control leaves it to their number.
"""

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from ipywidgets import HTML, Dropdown, FloatText, HBox, IntText, Layout, Text, ValueWidget, VBox

from shardlab.course.widgets.history import WORDS
from shardlab.engines import STRATEGIES, Strategy, engine_options
from shardlab.engines.fsdp_units import SHARDINGS
from shardlab.experiment import CompareConfig, Workload
from shardlab.experiment.config import BUILTIN_FIELDS, ENGINE_FIELDS, SEQUENCES_PER_RANK
from shardlab.experiment.options import option_helps
from shardlab.models import MODELS
from shardlab.units import wrap_text
from shardlab.vocabulary import Offload

STYLE: dict[str, str] = {"description_width": "7em"}
PRECISIONS = ("full", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
# The columns of the panel: what a step trains, who trains it, and what the engine is told.
COLUMNS = {
    "what a step trains": ("model", "steps", "batch", "seq_len", "accumulation", "clip"),
    "who trains it": ("strategies", "ranks", "tp", "link", "device"),
    "how": ("wrap", "bucket_mib", "precision", "sharding", "prefetch", "offload"),
}


# Numbers that may be left out: their controls hold a text.
OPTIONAL: dict[str, type[int] | type[float]] = {"batch": int, "clip": float}


class Choices:
    """The controls, by the name of their option.

    Args:
        config: initial values. Its options without a control are kept where they apply; its workload is one of the
            models to choose from.
    """

    def __init__(self, config: CompareConfig) -> None:
        self._base = config
        self.inputs, helps = _inputs(config), option_helps()
        for name, control in self.inputs.items():
            control.tooltip = helps[name]
            control.observe(lambda _: self.show_what_counts(), names="value")
        self.show_what_counts()

    def config(self) -> CompareConfig:
        """The configuration for the values of the controls.

        Raises:
            ValueError, TypeError: ``compare`` refuses the values, for the same reasons.
        """
        said = {name: control.value for name, control in self.inputs.items() if not control.disabled}
        said |= {name: _number(name, said[name]) for name in OPTIONAL if name in said}
        said["strategies"] = (said["strategies"],)
        if "link" in said:
            said["link"] = said["link"].strip() or None
        if said["wrap"] == wrap_text(self._base.wrap_policy):
            said["wrap"] = self._base.wrap  # as it was: a class or a function has no text that can be read back
        if isinstance(said["model"], Workload):
            said["workload"] = said.pop("model")
        return CompareConfig(**(self._kept() | said))

    def choose(self, changes: Mapping[str, Any]) -> None:
        """Set controls, as a user would.

        Raises:
            ValueError: there is no such control, or it does not offer that value.
        """
        for name, value in changes.items():
            if name not in self.inputs:
                raise ValueError(f"{name}: there is no such control; there are {', '.join(self.inputs)}")
            control = self.inputs[name]
            offered = control.options if isinstance(control, Dropdown) else ()
            values = [option[1] if isinstance(option, tuple) else option for option in offered]
            if isinstance(control, Dropdown) and value not in values:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, values))}")
            number = Integral if isinstance(control, IntText) else Real if isinstance(control, FloatText) else object
            if not isinstance(value, number):  # else the control would round it, or refuse it in words of its own
                raise ValueError(f"{name}: {value!r} is not a {'whole ' * (number is Integral)}number")
            control.value = _text(value) if isinstance(control, Text) else value

    def show_what_counts(self) -> None:
        """Disable the controls that the chosen strategy or model does not take."""
        for name, control in self.inputs.items():
            control.disabled = not self._takes(name)
        batch = self.inputs["batch"]
        batch.placeholder = "that of the data" if batch.disabled else f"{self._usual_batch()} by default"

    def _usual_batch(self) -> int:
        """The batch if none is chosen."""
        controls = (self.inputs[name] for name in ("ranks", "tp", "accumulation"))
        ranks, tp, accumulation = (1 if one.disabled else max(1, int(one.value)) for one in controls)
        return SEQUENCES_PER_RANK * max(1, ranks // tp) * accumulation

    def box(self) -> HBox:
        """The layout of the controls."""
        columns = [
            VBox([HTML(f"<b>{title}</b>"), *(self.inputs[name] for name in names)]) for title, names in COLUMNS.items()
        ]
        return HBox(columns, layout=Layout(flex_flow="row wrap"))

    def _kept(self) -> dict[str, Any]:
        """The options without a control that apply to the chosen strategy and model."""
        hybrid = not self.inputs["sharding"].disabled and self.inputs["sharding"].value == "hybrid_shard"
        return {
            field.name: getattr(self._base, field.name)
            for field in fields(CompareConfig)
            if field.name not in {*self.inputs, "workload"}
            and self._takes(field.name)
            and (field.name != "shard_group" or hybrid)
            and (field.name != "dtype" or self._base.workload is None)
        }

    def _takes(self, name: str) -> bool:
        """Whether an option has an effect under the chosen strategy and on the chosen model."""
        strategy, model = str(self.inputs["strategies"].value), self.inputs["model"].value
        said_by_a_workload = {*BUILTIN_FIELDS, "dtype"} - {"model"}
        if isinstance(model, Workload) and (name in said_by_a_workload or (name == "batch" and not model.is_dataset)):
            return False
        if name in ENGINE_FIELDS:
            return ENGINE_FIELDS[name] in engine_options(strategy)
        # torch_tp divides over all ranks, whatever is said.
        of_ours = ("link", "transport", "tp", "sequence_parallel")
        kind = STRATEGIES[strategy]
        return name not in of_ours or (issubclass(kind, Strategy) and not kind.is_alone)


def _inputs(config: CompareConfig) -> dict[str, ValueWidget]:
    """A control for each option that can be chosen, by its name, with the value of ``config``."""
    own = [] if config.workload is None else [(str(config.workload), config.workload)]
    choices = {
        "strategies": STRATEGIES, "model": [*own, *((name, name) for name in MODELS)], "precision": PRECISIONS,
        "sharding": SHARDINGS, "offload": tuple(Offload), "device": DEVICES,
    }  # fmt: skip
    placeholders = {"clip": "none", "link": "real; or 10Gbps,50us", "wrap": "auto; root; blocks.*; 100000"}
    first = {"strategies": config.strategies[0], "model": config.workload or config.model,
             "wrap": wrap_text(config.wrap_policy), "batch": config.resumed_rows}  # fmt: skip
    controls: dict[str, ValueWidget] = {}
    for name in (name for column in COLUMNS.values() for name in column):
        value, words = first.get(name, getattr(config, name)), WORDS.get(name, name)
        if name in choices:
            controls[name] = Dropdown(options=list(choices[name]), value=value, description=words, style=STYLE)
        elif name in (*OPTIONAL, "link", "wrap"):
            controls[name] = Text(
                value=_text(value), description=words, placeholder=placeholders.get(name, ""), style=STYLE,
                continuous_update=False,  # half a word would be refused while it is typed
            )  # fmt: skip
        else:
            kind = FloatText if isinstance(value, float) else IntText
            controls[name] = kind(value=value, description=words, style=STYLE)
    return controls


def _number(name: str, text: str) -> float | None:
    """The number in an optional control, None if it is empty."""
    kind = OPTIONAL[name]
    try:
        return kind(text) if text.strip() else None
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}: {text!r} is not {what}; or leave it empty") from None


def _text(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
