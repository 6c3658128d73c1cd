"""The figures of a workbench: all runs of a history together, or one of them in detail."""

from collections.abc import Callable, Sequence

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import overlap
from shardlab.analysis.timed import in_timed_steps, timed_steps
from shardlab.plots import (
    collective_timeline,
    loss_curves,
    memory_by_role,
    memory_over_step,
    overlap_bars,
    run_difference,
    shard_map,
    step_times,
    traffic_matrix,
    wire_volume,
)
from shardlab.plots.theme import nothing
from shardlab.trace.store import Records
from shardlab.vocabulary import Phase
from shardlab.widgets.history import RunHistory
from shardlab.widgets.runs_table import unlike

Draw = Callable[[RunHistory, str], go.Figure]


def overlay(history: RunHistory, view: str, label: str) -> go.Figure:
    """A figure of the history.

    Args:
        history: with at least one run.
        view: a key of ``VIEWS``.
        label: the run for views of one run, such as '2 zero1' (``history.labels()``).

    Raises:
        ValueError: the view or label is unknown, or there are no runs.
    """
    if view not in VIEWS:
        raise ValueError(f"view: {view!r} is not one of {', '.join(VIEWS)}")
    if label not in history.labels():
        raise ValueError(
            f"label: {label!r} is not one of {', '.join(history.labels()) or 'none: nothing has been run'}"
        )
    return VIEWS[view](history, label)


def _loss(history: RunHistory, _: str) -> go.Figure:
    return loss_curves(history.records().steps, _unlike(history, history.labels()))


def _unlike(history: RunHistory, labels: Sequence[str]) -> str:
    """In what runs differ beside their strategies."""
    parts = {label: label.partition(" ") for label in labels}
    return unlike({label: (history.runs[int(number)], strategy) for label, (number, _, strategy) in parts.items()})


def _times(history: RunHistory, _: str) -> go.Figure:
    return step_times(timed_steps(history.records().steps))


def _rest(history: RunHistory, _: str) -> go.Figure:
    return memory_by_role(history.records().memory)


def _peak(history: RunHistory, _: str) -> go.Figure:
    return memory_by_role(history.records().memory, "peak")


def _overlap(history: RunHistory, _: str) -> go.Figure:
    records = history.records()
    return overlap_bars(overlap(*in_timed_steps(records.collectives, records.spans, records.steps)))


def _sent(history: RunHistory, _: str) -> go.Figure:
    return wire_volume(_traffic(history.records()), runs=history.labels())


def _change(history: RunHistory, label: str) -> go.Figure:
    """The change from the previous run, whatever its strategy."""
    labels = history.labels()
    place = labels.index(label)
    if place == 0:
        return nothing(f"Change to {label}", "there is no run before it")
    before = labels[place - 1]
    strategy = label.partition(" ")[2]
    rows = [_cost_of(history, name).assign(strategy=strategy) for name in (before, label)]
    figure = run_difference(rows[0], rows[1], (before, label))
    said = [figure.layout.title.subtitle.text, _unlike(history, (before, label))]
    return figure.update_layout(title_subtitle_text="; ".join(filter(None, said)))


def _cost_of(history: RunHistory, label: str) -> pd.DataFrame:
    """The row of the summary of one run and strategy."""
    number, _, strategy = label.partition(" ")
    summary = history.comparisons[int(number)].summary
    return summary[summary["strategy"] == strategy]


def _timeline(history: RunHistory, label: str) -> go.Figure:
    records = history.records()
    return collective_timeline(_traffic(records), records.spans, run=label)


def _course(history: RunHistory, label: str) -> go.Figure:
    """Memory over the traced step, with the planned bytes at rest."""
    number, _, strategy = label.partition(" ")
    memory, (plan, why) = history.records().memory, history.runs[int(number)].plan(strategy)
    if plan is not None:
        memory = pd.concat([memory, plan.memory.assign(run=label)], ignore_index=True)
    figure = memory_over_step(memory, run=label)
    return figure if why is None else figure.update_layout(title_subtitle_text=f"Not planned: {why}")


def _matrix(history: RunHistory, label: str) -> go.Figure:
    return traffic_matrix(_traffic(history.records()), run=label)


def _slices(history: RunHistory, label: str) -> go.Figure:
    return shard_map(history.records().shards, run=label)


def _traffic(records: Records) -> pd.DataFrame:
    """The collectives without the reported loss."""
    return records.collectives[records.collectives["phase"] != Phase.METRICS]


VIEWS: dict[str, Draw] = {
    "loss": _loss,
    "time of a step": _times,
    "memory at rest": _rest,
    "memory at the peak": _peak,
    "communication: exposed and hidden": _overlap,
    "bytes sent": _sent,
    "change from the run before": _change,
    "one run: timeline": _timeline,
    "one run: memory over a step": _course,
    "one run: who sends to whom": _matrix,
    "one run: who holds which slice": _slices,
}
