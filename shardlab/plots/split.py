"""Where the time of a step goes: one bar per run, cut into compute, exposed communication, waiting, the rest."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.overlap import PARTS
from shardlab.analysis.rows import labelled, labels_of
from shardlab.plots.colours import EXPOSED, HIDDEN, SAND, SPAN_COLOURS
from shardlab.plots.labels import averaged, listing, subtitle
from shardlab.plots.stack import GAP, end_with
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import format_us
from shardlab.vocabulary import SpanKind

TITLE = "Where the time of a step goes"
COLUMNS = ("run", "source", "step", "step_us", *PARTS)
STYLE = {
    "compute_us": ("compute", SPAN_COLOURS[SpanKind.BACKWARD]),
    "moving_us": ("exposed communication", EXPOSED),
    "waiting_us": ("waiting for other ranks", SAND),
    "other_us": ("other", HIDDEN),
}


def step_parts(split: pd.DataFrame) -> go.Figure:
    """The parts of a step as stacked bars, one bar per run, the whole step written at the end.

    Each part is a mean over ranks and steps, so that the parts add up to the mean step.

    Args:
        split: what ``analysis.step_split`` returns; leave out the steps that should not count.

    Raises:
        ValueError: a column is missing.
    """
    missing = [name for name in COLUMNS if name not in split.columns]
    if missing:
        raise ValueError(f"split: missing columns {missing}; it comes from shardlab.analysis.step_split")
    if split.empty:
        return nothing(TITLE, "no steps recorded")
    rows = labelled(split)
    means = rows.groupby("label", sort=False)[["step_us", *PARTS]].mean().astype("float64")
    communicating = rows[rows["moving_us"] + rows["waiting_us"] > 0]  # only there does it matter what the link is
    figure = new_figure(TITLE, subtitle(communicating, averaged(rows, "mean")))
    for column, (name, colour) in STYLE.items():
        figure.add_trace(_bar(name, colour, means[column], means["step_us"]))
    words = [format_us(value) for value in means["step_us"]]
    end_with(figure, means["step_us"] / 1e3, words, labels_of(rows), "time of a step (ms)")
    return finish(figure, _summary(means))


def _bar(name: str, colour: str, times_us: pd.Series, steps_us: pd.Series) -> go.Bar:
    shares = [f"{part / step:.0%}" if step else "" for part, step in zip(times_us, steps_us, strict=True)]
    return go.Bar(
        x=(times_us / 1e3).where(times_us > 0).to_numpy(),
        y=list(times_us.index),
        orientation="h",
        name=name,
        marker={"color": colour, "line": GAP},
        customdata=[[format_us(value), share] for value, share in zip(times_us, shares, strict=True)],
        hovertemplate=f"<b>%{{y}}</b><br>{name}: %{{customdata[0]}}<br>%{{customdata[1]}} of the step<extra></extra>",
    )


def _summary(means: pd.DataFrame) -> str:
    parts = [
        f"{label} {format_us(row['step_us'])} ({format_us(row['compute_us'])} compute, "
        f"{format_us(row['moving_us'])} exposed communication, {format_us(row['waiting_us'])} waiting)"
        for label, row in means.iterrows()
    ]
    return f"A step: {listing(parts)}."
