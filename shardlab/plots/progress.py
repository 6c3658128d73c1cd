"""Training progress in one figure: loss, time of a step, and memory at rest, for all runs so far."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import at_rest
from shardlab.analysis.rows import labelled, labels_of
from shardlab.plots.bars import SEEN
from shardlab.plots.colours import ROLE_COLOURS, dash, run_colours
from shardlab.plots.loss import nested_width
from shardlab.plots.text import byte_scale, format_bytes, format_us, source_note
from shardlab.plots.theme import TEMPLATE, finish, nothing
from shardlab.plots.thinning import thinned
from shardlab.tables import MEMORY, STEPS

TITLE = "Training"
Trace = dict[str, Any]


def training_progress(steps: pd.DataFrame, memory: pd.DataFrame) -> go.Figure:
    """Three panels: loss by step, time by step (of the slowest rank), and live bytes at rest by role.

    Steps whose memory was traced have no time, because tracing slows them.

    Args:
        steps: table ``steps``, of one rank or of all.
        memory: table ``memory``; the last sample at rest of each run is drawn.
    """
    STEPS.check(steps)
    MEMORY.check(memory)
    rows = labelled(steps[steps["step"] >= 0])
    rows = rows.assign(step_us=rows["step_us"].where(~rows["traced_memory"].astype("bool")))
    if rows.empty:
        return nothing(TITLE, "no step has ended yet")
    columns = ["step", "loss", "step_us"]
    by_step = rows.groupby(["label", "step"], sort=False).agg(loss=("loss", "mean"), step_us=("step_us", "max"))
    curves = by_step.reset_index().astype(dict.fromkeys(columns, "float64"))
    labels = labels_of(rows)
    traces = _curves(curves, labels)
    held = labelled(at_rest(memory)) if len(memory) else None
    unit = "B"
    if held is not None and len(held):
        bars, unit = _memory_bars(held, labels)
        traces += bars
    last = curves[curves["label"] == labels[-1]].sort_values("step", kind="stable").iloc[-1]
    length = "memory traced" if pd.isna(last["step_us"]) else f"{format_us(float(last['step_us']))} a step"
    words = f"{labels[-1]}, step {last['step']:.0f}: loss {last['loss']:.4f}, {length}"
    note = source_note(steps)
    # Built at once: the figure is redrawn while ranks train, and plotly validates the whole figure at every change.
    figure = go.Figure(data=traces, layout=_layout(f"{words}; {note}" if note else words, unit))
    return finish(figure, f"{TITLE} of {len(labels)} {'run' if len(labels) == 1 else 'runs'}. {words}.")


def _layout(words: str, unit: str) -> dict[str, Any]:
    steps = {"title": {"text": "step"}, "tickformat": "d"}
    return {
        "template": TEMPLATE,
        "title": {"text": TITLE, "subtitle": {"text": words}},
        "height": 400,
        "barmode": "stack",
        "xaxis": {**steps, "domain": [0.0, 0.27]},
        "xaxis2": {**steps, "domain": [0.38, 0.66], "anchor": "y2"},
        "xaxis3": {"showgrid": False, "domain": [0.77, 1.0], "anchor": "y3"},
        "yaxis": {"title": {"text": "loss"}},
        "yaxis2": {"title": {"text": "time of a step (ms)"}, "rangemode": "tozero", "anchor": "x2"},
        "yaxis3": {"title": {"text": f"held at rest ({unit})"}, "rangemode": "tozero", "anchor": "x3"},
    }


def _curves(curves: pd.DataFrame, labels: list[str]) -> list[Trace]:
    """Loss and time of every run; each run is thinner, so that coinciding losses all stay visible."""
    traces: list[Trace] = []
    colours = run_colours(labels)
    for place, label in enumerate(labels):
        curve = curves[curves["label"] == label].sort_values("step", kind="stable")
        width = nested_width(place, len(labels))
        line = {"color": colours[label], "dash": dash(label)}
        loss = _curve(curve["step"], curve["loss"], f"<b>{label}</b><br>step %{{x}}<br>loss %{{y:.4f}}<extra></extra>")
        time = _curve(
            curve["step"], curve["step_us"] / 1e3, f"<b>{label}</b><br>step %{{x}}<br>%{{y:.1f}} ms<extra></extra>"
        )
        common = {"name": label, "legendgroup": label}
        traces.append(loss | common | {"line": line | {"width": width}})
        traces.append(time | common | {"line": line | {"width": 2}, "showlegend": False, "xaxis": "x2", "yaxis": "y2"})
    return traces


def _curve(steps: pd.Series, values: pd.Series, hover: str) -> Trace:
    known = values.notna().to_numpy()
    x, y = steps.to_numpy()[known], values.to_numpy(dtype=np.float64)[known]
    drawn = thinned(y) if len(y) else np.zeros(0, dtype=np.intp)
    mode = "lines" if len(drawn) > 1 else "markers"
    return {"type": "scatter", "x": x[drawn], "y": y[drawn], "mode": mode, "hovertemplate": hover}


def _memory_bars(held: pd.DataFrame, labels: list[str]) -> tuple[list[Trace], str]:
    """A stack of roles for each run, and the unit of its axis."""
    held = held.assign(bytes=held["bytes"].astype("float64"))
    divisor, unit = byte_scale(float(held.groupby("label")["bytes"].sum().max()))
    table = (
        held.pivot_table(index="role", columns="label", values="bytes", aggfunc="max")
        .reindex(columns=labels)
        .fillna(0.0)
    )
    traces: list[Trace] = []
    for role, colour in ROLE_COLOURS.items():
        if str(role) not in table.index or not (table.loc[str(role)] > 0).any():
            continue
        sizes, words = table.loc[str(role)].to_numpy(dtype=np.float64), str(role).replace("_", " ")
        traces.append({
            "type": "bar", "x": labels, "y": sizes / divisor, "name": words, "marker": {"color": colour},
            "customdata": [format_bytes(float(size)) for size in sizes], "xaxis": "x3", "yaxis": "y3",
            "showlegend": bool(sizes.max() >= SEEN * table.sum().max()),
            "hovertemplate": f"<b>%{{x}}</b><br>{words}: %{{customdata}}<extra></extra>",
        })  # fmt: skip
    return traces, unit
