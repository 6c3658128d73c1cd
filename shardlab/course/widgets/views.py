"""The pictures of a workbench: all runs together, or one of them in detail."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from shardlab import plots
from shardlab.analysis import overlap
from shardlab.analysis.rows import in_timed_steps, timed_steps
from shardlab.course.figures import run_difference
from shardlab.course.widgets.history import RunHistory, unlike
from shardlab.plots.theme import nothing
from shardlab.records.store import Records


def _unlike(history: RunHistory, labels: Sequence[str]) -> str:
    """In what runs differ beside their strategies."""
    return unlike({label: history.of(label) for label in labels})


def _overlap(records: Records) -> go.Figure:
    return plots.overlap_bars(overlap(*in_timed_steps(records.collectives, records.spans, records.steps)))


def _change(history: RunHistory, label: str) -> go.Figure:
    """The change from the previous run, whatever its strategy."""
    labels = history.labels()
    place = labels.index(label)
    if place == 0:
        return nothing(f"Change to {label}", "there is no run before it")
    before = labels[place - 1]
    figure = run_difference(_cost_of(history, before), _cost_of(history, label), (before, label))
    said = [figure.layout.title.subtitle.text, _unlike(history, (before, label))]
    return figure.update_layout(title_subtitle_text="; ".join(filter(None, said)))


def _cost_of(history: RunHistory, label: str) -> "pd.Series[Any]":
    """The row of the summary of one run and strategy."""
    run, strategy = history.of(label)
    summary = run.comparison.summary
    return summary[summary["strategy"] == strategy].iloc[0]


def _course(history: RunHistory, label: str) -> go.Figure:
    """Memory over the traced step, with the planned bytes at rest."""
    run, strategy = history.of(label)
    memory, plan = history.records().memory, run.plan(strategy)
    if isinstance(plan, str):
        return plots.memory_over_step(memory, run=label).update_layout(title_subtitle_text=f"Not planned: {plan}")
    return plots.memory_over_step(pd.concat([memory, plan.memory.assign(run=label)], ignore_index=True), run=label)


# Of a history with at least one run, and the label of a run.
VIEWS: dict[str, Callable[[RunHistory, str], go.Figure]] = {
    "loss": lambda history, _: plots.loss_curves(history.records().steps, _unlike(history, history.labels())),
    "time of a step": lambda history, _: plots.step_times(timed_steps(history.records().steps)),
    "memory at rest": lambda history, _: plots.memory_by_role(history.records().memory),
    "memory at the peak": lambda history, _: plots.memory_by_role(history.records().memory, "peak"),
    "communication: exposed and hidden": lambda history, _: _overlap(history.records()),
    "bytes sent": lambda history, _: plots.wire_volume(history.records().collectives, runs=history.labels()),
    "change from the run before": _change,
    "one run: timeline": lambda of, run: plots.collective_timeline(
        of.records().collectives, of.records().spans, run=run
    ),
    "one run: memory over a step": _course,
    "one run: who sends to whom": lambda history, run: plots.traffic_matrix(history.records().collectives, run=run),
    "one run: who holds which slice": lambda of, run: plots.shard_map(
        (rows := of.records().shards)[rows["run"] == run]
    ),
}
