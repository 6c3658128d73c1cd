"""A memory explorer: move a slider, and see at once what a rank would hold according to the planner."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from ipywidgets import Dropdown, FloatLogSlider, HBox, Layout, SelectionSlider, ToggleButtons, VBox

from shardlab.course.widgets.memory_plan import OPTIMIZERS, STRATEGIES, MemoryPlan
from shardlab.course.widgets.panel import Message, Panel, Picture
from shardlab.experiment import Workload
from shardlab.models import MODELS
from shardlab.planner import PRECISIONS
from shardlab.planner.gpu import Gpu, cards
from shardlab.plots import memory_by_role
from shardlab.plots.bars import draw_memory
from shardlab.plots.text import format_count
from shardlab.vocabulary import Sharding

ANY_NUMBER = "a number of parameters"
KNOWN = {  # counted from their published shapes
    "GPT-2 XL": 1_557_611_200.0, "Llama 2 7B": 6_738_415_616.0, "Llama 3 8B": 8_030_261_248.0,
    "Llama 2 13B": 13_015_864_320.0, "Llama 2 70B": 68_976_648_192.0,
}  # fmt: skip
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
VIEWS = {"strategies, side by side": "strategies", "one strategy, more and more ranks": "ranks"}
STYLE: dict[str, str] = {"description_width": "8.5em"}


def memory_explorer(plan: MemoryPlan | None = None) -> "Explorer":
    """Sliders for model, ranks, precision, optimizer and sharding, above a figure and a table of bytes at rest.

    In a script ``MemoryPlan`` answers the same questions.

    Args:
        plan: the initial values, such as ``MemoryPlan(workload, ranks=8)``; None for a GPT of 30 M parameters on 8
            ranks.

    Raises:
        TypeError: something else than a plan is given.
    """
    if not isinstance(plan, MemoryPlan | None):
        raise TypeError(f"memory_explorer: {plan!r:.60} is given; give a plan, such as MemoryPlan(workload, ranks=8)")
    return Explorer(plan or MemoryPlan())


class Explorer(Panel):
    """The panel of ``memory_explorer``; ``plan`` follows its controls and is ``None`` while they are invalid."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan: MemoryPlan | None = plan
        self.inputs = Inputs(plan)
        self.message = Message()
        self.figure, self.table = Picture(self._figure(plan)), Picture(plan.costs())
        for control in vars(self.inputs).values():
            control.observe(self._changed, names="value")
        self._say(plan)
        controls = VBox([self.inputs.box(), self.message.widget])
        super().__init__(controls, (self.figure, self.table), "memory explorer")

    def _changed(self, _: Any) -> None:
        self.inputs.show_what_counts()
        try:
            self.plan = plan = self.inputs.plan()
        except ValueError as error:
            self.plan = None
            self.message.fail(str(error))
            return
        self._say(plan)
        self.figure.replace(self._figure(plan))
        self.table.replace(plan.costs())

    def _figure(self, plan: MemoryPlan) -> go.Figure:
        if self.inputs.view.value == "ranks":
            strategy = str(self.inputs.strategy.value)
            memory, title = plan.by_ranks(strategy), f"Memory at rest of a rank under {strategy}"
        else:
            memory, title = plan.by_strategy(), f"Memory at rest of each of {plan.ranks:,} ranks"
        figure = memory_by_role(memory).update_layout(title_text=title)
        if (card := self.inputs.gpu.value) is not None:
            longest = float(memory.groupby(["run", "rank"])["bytes"].sum().max())
            draw_memory(figure, Gpu.parse(card).memory_bytes, longest)
        return figure

    def _say(self, plan: MemoryPlan) -> None:
        self.message.say(
            f"{format_count(plan.num_params)} parameters on {plan.ranks:,} ranks. Activations, gathered parameters and "
            "temporaries come on top of what is held at rest."
        )


class Inputs:
    """The controls of the explorer, at first with the values of ``plan``."""

    def __init__(self, plan: MemoryPlan) -> None:
        model, is_number = plan.model, isinstance(plan.model, int | float)
        models: list[tuple[str, Any]] = [*((name, name) for name in MODELS), *KNOWN.items(), (ANY_NUMBER, ANY_NUMBER)]
        if not isinstance(model, str | int | float):
            models.insert(0, (str(model) if isinstance(model, Workload) else type(model).__name__, model))
        self.view = ToggleButtons(options=VIEWS, style={"button_width": "auto"})
        self.model = _choice("model", models, ANY_NUMBER if is_number else model)
        self.num_params = FloatLogSlider(
            value=model if is_number else 7.5e9, min=6, max=13, step=0.05, readout_format=".3g",
            description="parameters", style=STYLE, continuous_update=True,
        )  # fmt: skip
        sizes = sorted({*RANKS, plan.ranks})
        self.ranks = SelectionSlider(options=sizes, value=plan.ranks, description="ranks", style=STYLE)
        self.strategy = _choice("strategy", STRATEGIES, "zero2")
        self.precision = _choice("precision", tuple(PRECISIONS), plan.precision)
        self.optimizer = _choice("optimizer", tuple(OPTIMIZERS), plan.optimizer)
        self.sharding = _choice("fsdp shards", tuple(map(str, Sharding)), str(plan.sharding))
        self.shard_group = _choice("shard group", _divisors(plan.ranks), plan.group)
        self.gpu = _choice("memory of", [("no GPU", None), *((name, name) for name in cards())], None)
        self.show_what_counts()

    def box(self) -> VBox:
        """The layout of the controls."""
        columns = (
            (self.model, self.num_params, self.ranks), (self.precision, self.optimizer, self.strategy),
            (self.sharding, self.shard_group, self.gpu),
        )  # fmt: skip
        return VBox([HBox([VBox(column) for column in columns], layout=Layout(flex_flow="row wrap")), self.view])

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
            ranks=int(self.ranks.value), precision=str(self.precision.value), optimizer=str(self.optimizer.value),
            sharding=str(self.sharding.value), shard_group=int(self.shard_group.value) if hybrid else None,
        )  # fmt: skip


def _choice(name: str, options: Sequence[Any], value: Any) -> Dropdown:
    return Dropdown(options=options, value=value, description=name, style=STYLE)


def _divisors(ranks: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, ranks + 1) if ranks % size == 0)
