"""One recorded training step, event by event: each click moves to the next and shows the state of every rank."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from ipywidgets import Button, Dropdown, HBox, IntSlider, Layout, Play, VBox, jslink

from shardlab.analysis.rows import one_run, one_step
from shardlab.course.widgets.panel import Message, Panel, Picture
from shardlab.course.widgets.step_events import ROLES, events_of_step, ranks_at, traced_step
from shardlab.plots import collective_timeline
from shardlab.plots.bars import stacked_bars
from shardlab.plots.text import byte_listing, byte_scale, format_us
from shardlab.plots.theme import INK, ROLE_COLOURS, finish, new_figure, nothing
from shardlab.records.store import Records

ALL_RANKS = -1
PLAY_MS = 700


def step_through(records: Records, run: str | None = None, step: int | None = None) -> "StepView":
    """Buttons and a slider through the events of one step, above its timeline and the memory of each rank.

        step_through(compare(workload, strategies="zero3", steps=3).records)

    In a script ``events_of_step`` and ``ranks_at`` give the same as tables.

    Args:
        records: of one run or several.
        run: which run; None if there is only one.
        step: which step; None for the traced one with the highest peak, else the last.

    Raises:
        ValueError: there is no such run or step, there are several runs and none is named, or nothing was recorded.
        TypeError: something else than records is given.
    """
    if not isinstance(records, Records):
        raise TypeError(f"step_through: {records!r:.60} is given; give records, as those of compare(...).records")
    return StepView(records, run, step)


class StepView(Panel):
    """The panel of ``step_through``; ``index`` is the number of the event that is shown."""

    def __init__(self, records: Records, run: str | None, step: int | None) -> None:
        steps = one_run(records.steps[records.steps["step"] >= 0], run)
        self.step = one_step(steps, traced_step(steps) if step is None else step)
        self.run = str(steps["run"].iloc[0])
        self.events = events_of_step(records, run=self.run, step=self.step)
        self._shown = self.events.index
        self._most_bytes = float(self.events[list(ROLES)].sum(axis=1, skipna=True).max())
        self._timeline = collective_timeline(records.collectives, records.spans, run=self.run, step=self.step)
        self._fixed_shapes = self._timeline.layout.shapes
        self.message = Message()
        self._make_controls()
        self.timeline, self.held = Picture(self._timeline_at(0)), Picture(self._held_at(0))
        self.ranks = Picture(self._doing_at(0))
        self._say(0)
        purpose = f"step {self.step} of {self.run}, event by event"
        super().__init__(self._box(), (self.ranks, self.timeline, self.held), purpose)

    @property
    def index(self) -> int:
        """Row in ``events`` of the event that is shown."""
        return int(self._shown[self.slider.value])

    def next(self) -> None:
        """Move to the next event."""
        self.slider.value = min(self.slider.value + 1, self.slider.max)

    def previous(self) -> None:
        """Move to the previous event."""
        self.slider.value = max(self.slider.value - 1, 0)

    def _make_controls(self) -> None:
        self.back = Button(description="previous", icon="step-backward", layout=Layout(width="auto"))
        narrow = Layout(width="auto")
        self.forth = Button(description="next", icon="step-forward", button_style="primary", layout=narrow)
        self.slider = IntSlider(max=len(self._shown) - 1, description="event", layout=Layout(flex="1 1 24em"))
        self.play = Play(max=len(self._shown) - 1, interval=PLAY_MS)
        ranks = [("all ranks", ALL_RANKS), *((f"rank {rank}", rank) for rank in sorted(set(self.events["rank"])))]
        self.follow = Dropdown(options=ranks, value=ALL_RANKS, description="follow", layout=Layout(width="14em"))
        self.back.on_click(lambda _: self.previous())
        self.forth.on_click(lambda _: self.next())
        self.slider.observe(self._moved, names="value")
        self.follow.observe(self._followed, names="value")

    def _box(self) -> VBox:
        jslink((self.play, "value"), (self.slider, "value"))
        row = HBox([self.back, self.forth, self.play, self.slider, self.follow], layout=Layout(flex_flow="row wrap"))
        return VBox([row, self.message.widget])

    def _moved(self, _: Any) -> None:
        self._say(self.index)
        self.ranks.replace(self._doing_at(self.index))
        self.timeline.replace(self._timeline_at(self.index))
        self.held.replace(self._held_at(self.index))

    def _followed(self, change: Any) -> None:
        """Leave out the events of other ranks, and stay at the current time."""
        index, rank = self.index, change["new"]
        self._shown = self.events.index if rank == ALL_RANKS else self.events.index[self.events["rank"] == rank]
        last = len(self._shown) - 1
        place = min(int(self._shown.searchsorted(index)), last)
        self.slider.value = min(self.slider.value, last)
        self.slider.max = self.play.max = last
        self.slider.value = place
        self._moved(None)

    def _say(self, index: int) -> None:
        event = self.events.iloc[index]
        place = f"Event {self.slider.value + 1} of {len(self._shown)}"
        self.message.say(f"{place}, {format_us(float(event['time_us']))}: rank {event['rank']} {event['words']}.")

    def _timeline_at(self, index: int) -> go.Figure:
        """The timeline with a line at the time of the event."""
        time_ms = float(self.events["time_us"].iloc[index]) / 1e3
        self._timeline.layout.shapes = self._fixed_shapes
        return self._timeline.add_vline(x=time_ms, line={"color": INK, "width": 2.5})

    def _held_at(self, index: int) -> go.Figure:
        moment = f"after {format_us(float(self.events['time_us'].iloc[index]))} of the step"
        return held_by_rank(ranks_at(self.events, index), self._most_bytes, moment)

    def _doing_at(self, index: int) -> pd.DataFrame:
        now = ranks_at(self.events, index)
        shown = now[["rank", "computes", "waits_for", "in_flight"]].replace("", "–")
        return shown.set_axis(["rank", "computes", "waits for", "under way"], axis=1)


def held_by_rank(ranks: pd.DataFrame, most_bytes: float, moment: str) -> go.Figure:
    """Live bytes of each rank as stacked bars.

    Args:
        ranks: of ``ranks_at``.
        most_bytes: the end of the axis, so that figures of one step share it.
        moment: the time, for the subtitle.
    """
    held = ranks.melt("rank", list(ROLES), "role", "bytes").dropna()
    if held.empty:
        return nothing("Held by each rank", "memory was not recorded")
    figure, held = new_figure("Held by each rank", moment), held.assign(label="rank " + held["rank"].astype(str))
    totals = stacked_bars(figure, held, "role", ROLE_COLOURS, "live bytes")
    figure.update_xaxes(range=[0, 1.02 * most_bytes / byte_scale(float(totals.max()))[0]])
    return finish(figure, f"Held by each rank ({moment}): {byte_listing(totals)}.")
