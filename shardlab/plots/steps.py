"""Step times: every step a dot, the quartiles a bar, the median a line."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.analysis.rows import labelled, labels_of
from shardlab.plots.colours import run_colours
from shardlab.plots.labels import listing, subtitle
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import format_us
from shardlab.tables import STEPS

MAX_DOTS = 400


def step_times(steps: pd.DataFrame) -> go.Figure:
    """Time of a step for each run: median and quartiles over ranks and steps.

    Steps in which memory was traced are left out: tracing slows them.

    Args:
        steps: table ``steps``.
    """
    STEPS.check(steps)
    timed = steps[~steps["traced_memory"].fillna(False).astype(bool) & (steps["step"] >= 0)]
    timed = labelled(timed[np.isfinite(timed["step_us"].astype("float64"))])
    if timed.empty:
        return nothing("Time of a step", "no timed steps (steps with traced memory do not count)")
    labels = labels_of(timed)
    note = "median and quartiles; a dot is one step on one rank"
    if timed.groupby("label").size().max() > MAX_DOTS:
        note = f"median and quartiles; of each run at most {MAX_DOTS} of its steps as dots"
    figure = new_figure("Time of a step", subtitle(timed, note))
    colours = run_colours(labels)
    medians = []
    for place, label in enumerate(labels):
        times_us = timed.loc[timed["label"] == label, "step_us"].to_numpy(dtype=np.float64)
        quartiles_us = np.quantile(times_us, [0.25, 0.5, 0.75])
        _draw(figure, label, (place, colours[label]), times_us, quartiles_us)
        medians.append(f"{label} {format_us(quartiles_us[1])}")
    figure.update_layout(height=max(340, 190 + 62 * len(labels)), showlegend=False)
    figure.update_xaxes(title_text="time of a step (ms)", rangemode="tozero")
    figure.update_yaxes(
        tickvals=list(range(len(labels))),
        ticktext=labels,
        range=[len(labels) - 0.4, -0.6],
        showgrid=False,
        zeroline=False,
    )
    return finish(figure, f"Median time of a step: {listing(medians)}.")


def _draw(
    figure: go.Figure,
    label: str,
    style: tuple[int, str],
    times_us: NDArray[np.float64],
    quartiles_us: NDArray[np.float64],
) -> None:
    """Dots under the row's line, the quartile bar and the median on it."""
    place, colour = style
    low, median, high = quartiles_us / 1e3
    dots = times_us[:: -(-len(times_us) // MAX_DOTS)] / 1e3
    figure.add_scatter(
        x=dots,
        y=place + 0.3 + 0.06 * (np.arange(len(dots)) % 3 - 1),
        mode="markers",
        name=f"{label}: steps",
        marker={"color": colour, "size": 6, "opacity": 0.55},
        hovertemplate=f"<b>{label}</b><br>%{{x:.3f}} ms<extra></extra>",
    )
    figure.add_scatter(
        x=[median],
        y=[place],
        mode="markers+text",
        name=label,
        text=[f"<b>{format_us(1e3 * median)}</b>"],
        textposition="top center",
        marker={"color": colour, "size": 15, "symbol": "line-ns", "line": {"color": colour, "width": 4}},
        error_x={"type": "data", "symmetric": False, "array": [high - median], "arrayminus": [median - low],
                 "color": colour, "thickness": 9, "width": 0},
        customdata=[[format_us(1e3 * low), format_us(1e3 * high), len(times_us)]],
        hovertemplate=f"<b>{label}</b><br>median %{{x:.3f}} ms<br>quartiles %{{customdata[0]}} to %{{customdata[1]}}"
        "<br>%{customdata[2]} steps<extra></extra>",
    )  # fmt: skip
