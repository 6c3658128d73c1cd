"""A memory explorer: move a slider, and see at once what a rank would hold according to the planner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from ipywidgets import Dropdown, FloatLogSlider, HBox, Layout, SelectionSlider, ToggleButtons, VBox
from torch import nn

from shardlab.experiment import CompareConfig, Workload
from shardlab.models import MODELS
from shardlab.planner import PRECISIONS
from shardlab.plots import memory_by_role
from shardlab.plots.text import format_count
from shardlab.vocabulary import Sharding
from shardlab.widgets.memory_plan import OPTIMIZERS, STRATEGIES, MemoryPlan
from shardlab.widgets.panel import Message, Panel, Picture

ANY_NUMBER = "a number of parameters"
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
VIEWS = {"strategies, side by side": "strategies", "one strategy, more and more ranks": "ranks"}
STYLE: dict[str, str] = {"description_width": "8.5em"}


def memory_explorer(
    what: MemoryPlan | CompareConfig | Workload | nn.Module | Callable[[], nn.Module] | str | float | None = None,
    *rest: Any,
) -> "Explorer":
    """Sliders for model, ranks, precision, optimizer and sharding, above a figure and a table of bytes at rest.

    In a script ``MemoryPlan`` answers the same questions.

    Args:
        what: a workload, or a function that makes the model (data and loss follow), or a configuration, as of
            ``compare``; or only a model, as of ``MemoryPlan``; or the plan with all initial values. None for a GPT of
            30 M parameters on 8 ranks.
        rest: data and loss, if ``what`` makes the model.

    Raises:
        ValueError, TypeError: as ``MemoryPlan`` and ``Workload``.
    """
    if isinstance(what, MemoryPlan):
        return Explorer(what)
    if what is None:
        return Explorer(MemoryPlan())
    if isinstance(what, CompareConfig):
        return Explorer(MemoryPlan(what.workload or what.model, what.ranks, sharding=what.sharding))
    return Explorer(MemoryPlan(Workload(what, *rest) if rest else what))  # type: ignore[arg-type]  # checked there


class Explorer(Panel):
    """The panel of ``memory_explorer``; ``plan`` follows its controls and is ``None`` while they are invalid."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan: MemoryPlan | None = plan
        self.inputs = Inputs.of(plan)
        self.message = Message()
        self.figure, self.table = Picture(self._figure(plan)), Picture(plan.costs())
        for control in self.inputs.all():
            control.observe(self._changed, names="value")
        self._say(plan)
        super().__init__(
            VBox([self.inputs.box(), self.message.widget]),
            (self.figure, self.table),
            "memory explorer",
        )

    def _changed(self, _: Any) -> None:
        inputs = self.inputs
        inputs.show_what_counts()
        try:
            plan = inputs.plan()
        except ValueError as error:
            self.plan = None
            self.message.fail(str(error))
            return
        self.plan = plan
        self._say(plan)
        self.figure.replace(self._figure(plan))
        self.table.replace(plan.costs())

    def _figure(self, plan: MemoryPlan) -> go.Figure:
        if self.inputs.view.value == "ranks":
            strategy = str(self.inputs.strategy.value)
            figure = memory_by_role(plan.by_ranks(strategy))
            return figure.update_layout(title_text=f"Memory at rest of a rank under {strategy}")
        figure = memory_by_role(plan.by_strategy())
        return figure.update_layout(title_text=f"Memory at rest of each of {plan.ranks:,} ranks")

    def _say(self, plan: MemoryPlan) -> None:
        self.message.say(
            f"{format_count(plan.num_params)} parameters on {plan.ranks:,} ranks. Activations, gathered parameters and "
            "temporaries come on top of what is held at rest."
        )


@dataclass(frozen=True)
class Inputs:
    """The controls of the explorer."""

    view: ToggleButtons
    model: Dropdown
    num_params: FloatLogSlider
    ranks: SelectionSlider
    strategy: Dropdown
    precision: Dropdown
    optimizer: Dropdown
    sharding: Dropdown
    shard_group: Dropdown

    @classmethod
    def of(cls, plan: MemoryPlan) -> "Inputs":
        """Controls with the values of ``plan``."""
        is_number = isinstance(plan.model, int | float)
        models = [(name, name) for name in (*MODELS, ANY_NUMBER)]
        own = [] if isinstance(plan.model, str | int | float) else [(_name(plan.model), plan.model)]
        sizes = sorted({*RANKS, plan.ranks})
        inputs = cls(
            view=ToggleButtons(options=VIEWS, style={"button_width": "auto"}),
            model=_choice("model", (*own, *models), ANY_NUMBER if is_number else plan.model),
            num_params=FloatLogSlider(
                value=plan.model if is_number else 7.5e9, min=6, max=13, step=0.05, readout_format=".2s",
                description="parameters", style=STYLE, continuous_update=True,
            ),
            ranks=SelectionSlider(options=sizes, value=plan.ranks, description="ranks", style=STYLE),
            strategy=_choice("strategy", STRATEGIES, "zero2"),
            precision=_choice("precision", tuple(PRECISIONS), plan.precision),
            optimizer=_choice("optimizer", tuple(OPTIMIZERS), plan.optimizer),
            sharding=_choice("fsdp shards", tuple(map(str, Sharding)), str(plan.sharding)),
            shard_group=_choice("shard group", _divisors(plan.ranks), plan.group),
        )  # fmt: skip
        inputs.show_what_counts()
        return inputs

    def all(self) -> tuple[Any, ...]:
        """Every control."""
        return tuple(vars(self).values())

    def box(self) -> VBox:
        """The layout of the controls."""
        columns = (
            VBox([self.model, self.num_params, self.ranks]),
            VBox([self.precision, self.optimizer, self.strategy]),
            VBox([self.sharding, self.shard_group]),
        )
        return VBox([HBox(columns, layout=Layout(flex_flow="row wrap")), self.view])

    def show_what_counts(self) -> None:
        """Disable controls without effect, and offer groups that divide the ranks."""
        self.num_params.disabled = self.model.value != ANY_NUMBER
        # Its number is not that of the chosen model.
        self.num_params.layout.display = "none" if self.num_params.disabled else "flex"
        self.strategy.disabled = self.view.value != "ranks"
        self.shard_group.disabled = self.sharding.value != Sharding.HYBRID_SHARD
        groups = _divisors(int(self.ranks.value))
        if tuple(self.shard_group.options) != groups:
            kept = self.shard_group.value if self.shard_group.value in groups else groups[-1]
            self.shard_group.options = groups
            self.shard_group.value = kept

    def plan(self) -> MemoryPlan:
        """The plan for the values of the controls.

        Raises:
            ValueError: the values are invalid.
        """
        hybrid = self.sharding.value == Sharding.HYBRID_SHARD
        return MemoryPlan(
            model=float(round(self.num_params.value)) if self.model.value == ANY_NUMBER else self.model.value,
            ranks=int(self.ranks.value),
            precision=str(self.precision.value),
            optimizer=str(self.optimizer.value),
            sharding=str(self.sharding.value),
            shard_group=int(self.shard_group.value) if hybrid else None,
        )


def _name(model: Any) -> str:
    return str(model) if isinstance(model, Workload) else type(model).__name__


def _choice(name: str, options: tuple[Any, ...], value: Any) -> Dropdown:
    return Dropdown(options=options, value=value, description=name, style=STYLE)


def _divisors(ranks: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, ranks + 1) if ranks % size == 0)
