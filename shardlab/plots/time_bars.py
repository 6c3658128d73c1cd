"""Times of a step by run: how long steps took, how the time is spent, and how much communication is hidden."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.analysis.overlap import PARTS, hidden_by_run
from shardlab.analysis.rows import labelled, labels_of, require_columns, traced
from shardlab.plots import theme
from shardlab.plots.bars import add_part, end_with, shares_of
from shardlab.plots.text import averaged, format_percent, format_us, listing, subtitle
from shardlab.plots.theme import finish, new_figure, nothing, run_colours
from shardlab.records.tables import STEPS
from shardlab.vocabulary import SpanKind

MAX_DOTS = 400
NEAR_AN_END = 0.15  # of the longest step
PARTS_TITLE = "Where the time of a step goes"
PARTS_COLUMNS = ("run", "source", "step", "step_us", *PARTS)
STYLE = {
    "compute_us": ("compute", theme.SPAN_COLOURS[SpanKind.BACKWARD]),
    "moving_us": ("exposed communication", theme.EXPOSED),
    "waiting_us": ("waiting for other ranks", theme.WAITING),
    "off_cpu_us": ("off the CPU", theme.SPAN_COLOURS[SpanKind.OFF_CPU]),
    "other_us": ("other", theme.REST),
}
OVERLAP_TITLE = "Communication: exposed and hidden behind compute"
OVERLAP_COLUMNS = ("run", "source", "rank", "step", "comm_us", "both_us", "overlap", "exposed_us")


def step_times(steps: pd.DataFrame) -> go.Figure:
    """Time of a step for each run: median and quartiles over steps, of each the median over its ranks.

    Steps with traced memory are left out, because tracing slows them, unless a run has no others.

    Args:
        steps: table ``steps``.
    """
    STEPS.check(steps)
    timed, counts = steps[steps["step"] >= 0], ~traced(steps)
    timed = timed[counts | ~counts.groupby(steps["run"]).transform("any")]
    timed = labelled(timed[np.isfinite(timed["step_us"].astype("float64"))])
    if timed.empty:
        return nothing("Time of a step", "no timed steps")
    labels = labels_of(timed)
    lengths = timed.groupby(["label", "step"])["step_us"].median()
    note = "median and quartiles; a dot is one step, the median over its ranks"
    if lengths.groupby("label").size().max() > MAX_DOTS:
        note = f"median and quartiles; of each run at most {MAX_DOTS} of its steps as dots"
    figure, longest_us = new_figure("Time of a step", subtitle(timed, note)), float(lengths.max())
    colours = run_colours(labels)
    medians = []
    for place, label in enumerate(labels):
        times_us = lengths[label].to_numpy(dtype=np.float64)
        _draw(figure, label, place, colours[label], times_us, longest_us)
        medians.append(f"{label} {format_us(np.median(times_us))}")
    figure.update_layout(height=max(340, 190 + 62 * len(labels)), showlegend=False)
    figure.update_xaxes(title_text="time of a step (ms)", rangemode="tozero")
    figure.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=labels, range=[len(labels) - 0.4, -0.6], showgrid=False,
        zeroline=False,
    )  # fmt: skip
    return finish(figure, f"Median time of a step: {listing(medians)}.")


def _draw(
    figure: go.Figure, label: str, place: int, colour: str, times_us: NDArray[np.float64], longest_us: float
) -> None:
    """The quartile bar with the median, and a dot below it for each step."""
    low, median, high = np.quantile(times_us, [0.25, 0.5, 0.75]) / 1e3
    dots = times_us[:: -(-len(times_us) // MAX_DOTS)] / 1e3
    figure.add_scatter(
        x=dots, y=place + 0.3 + 0.06 * (np.arange(len(dots)) % 3 - 1), mode="markers", name=f"{label}: steps",
        marker={"color": colour, "size": 6},
        hovertemplate=f"<b>{label}</b><br>%{{x:.3f}} ms<extra></extra>",
    )  # fmt: skip
    middle = 1e3 * median / longest_us  # near an end of the axis, which would cut off its words, they lie inside of it
    side = "right" if middle < NEAR_AN_END else "left" if middle > 1 - NEAR_AN_END else "center"
    figure.add_scatter(
        x=[median], y=[place], mode="markers+text", name=label,
        text=[f"<b>{format_us(1e3 * median)}</b>"], textposition=f"top {side}",
        marker={"color": colour, "size": 15, "symbol": "line-ns", "line": {"color": colour, "width": 4}},
        error_x={"type": "data", "symmetric": False, "array": [high - median], "arrayminus": [median - low],
                 "color": colour, "thickness": 9, "width": 0},
        customdata=[[format_us(1e3 * low), format_us(1e3 * high), len(times_us)]],
        hovertemplate=f"<b>{label}</b><br>median %{{x:.3f}} ms<br>quartiles %{{customdata[0]}} to %{{customdata[1]}}"
        "<br>%{customdata[2]} steps<extra></extra>",
    )  # fmt: skip


def step_parts(split: pd.DataFrame) -> go.Figure:
    """The parts of a step as stacked bars, one bar per run, the whole step written at the end.

    Each part is a mean over ranks and steps, so the parts add up to the mean step. What the link costs is red, waiting
    for a rank that is late red and hatched, time off the CPU amber and hatched; a line spans the quartiles of steps.

    Args:
        split: the result of ``analysis.step_split``, without the steps that should not count.

    Raises:
        ValueError: a column is missing.
    """
    require_columns(split, PARTS_COLUMNS, "split", "it comes from shardlab.analysis.step_split")
    if split.empty:
        return nothing(PARTS_TITLE, "no steps recorded")
    rows = labelled(split)
    means = rows.groupby("label", sort=False)[["step_us", *PARTS]].mean().astype("float64")
    communicating = rows[rows["moving_us"] + rows["waiting_us"] > 0]  # the link matters only to these
    figure = new_figure(PARTS_TITLE, subtitle(communicating, f"{averaged(rows, 'mean')}; line: quartiles"))
    for column, (name, colour) in STYLE.items():
        texts = zip(map(format_us, means[column]), shares_of(means[column], means["step_us"]), strict=True)
        hover = "%{customdata[0]}<br>%{customdata[1]} of the step"
        add_part(figure, name, colour, means[column] / 1e3, texts, hover)
    whole = rows.groupby("label", sort=False)["step_us"]
    low, high = (whole.quantile(share).astype("float64") / 1e3 for share in (0.25, 0.75))
    words = [format_us(us) for us in means["step_us"]]
    end_with(figure, (means["step_us"] / 1e3).clip(lower=high), words, "time of a step (ms)")
    for colour, thickness in ((theme.PAPER, 4), (theme.TEXT, 1.5)):  # seen on every part, and on light and dark pages
        figure.add_scatter(
            x=(low + high) / 2, y=list(means.index), mode="markers", name="quartiles of whole steps",
            marker={"opacity": 0}, hoverinfo="skip", showlegend=False,
            error_x={"type": "data", "array": (high - low) / 2, "color": colour, "thickness": thickness},
        )  # fmt: skip
    return finish(figure, _parts_summary(means))


def _parts_summary(means: pd.DataFrame) -> str:
    parts = [
        f"{label} {format_us(row['step_us'])} ({format_us(row['compute_us'])} compute, "
        f"{format_us(row['moving_us'])} exposed communication, {format_us(row['waiting_us'])} waiting, "
        f"{format_us(row['off_cpu_us'])} off the CPU)"
        for label, row in means.iterrows()
    ]
    return f"A step: {listing(parts)}."


def overlap_bars(overlap_table: pd.DataFrame) -> go.Figure:
    """Exposed and hidden communication of each run, with the overlap in percent at the end of the bar.

    The numbers are those of ``analysis.overlap.hidden_by_run``: medians over steps (without the setup, step -1), of
    each step's median over ranks, and the overlap of a rank's steps together, as in a summary.

    Args:
        overlap_table: the result of ``analysis.overlap``.

    Raises:
        ValueError: columns are missing.
    """
    require_columns(overlap_table, OVERLAP_COLUMNS, "overlap table", "it comes from shardlab.analysis.overlap")
    rows = labelled(overlap_table[overlap_table["step"] >= 0])
    if rows.empty:
        return nothing(OVERLAP_TITLE, "no steps recorded")
    medians = hidden_by_run(overlap_table)
    figure = new_figure(OVERLAP_TITLE, subtitle(rows, f"{averaged(rows, 'median')}; overlap at the end of the bar"))
    parts = (("exposed_us", "exposed", theme.EXPOSED), ("both_us", "hidden behind compute", theme.HIDDEN))
    for column, name, colour in parts:
        texts = zip(map(format_us, medians[column]), strict=True)
        add_part(figure, name, colour, medians[column] / 1e3, texts, "%{customdata[0]}")
    hidden = [_hidden(row["overlap"], row["comm_us"]) for row in medians.to_dict("records")]
    end_with(figure, (medians["exposed_us"] + medians["both_us"]) / 1e3, hidden, "time per rank and step (ms)")
    said = [
        f"{label} {words}" + ("" if np.isnan(row["overlap"]) else f" with {format_us(row['exposed_us'])} exposed")
        for (label, row), words in zip(medians.iterrows(), hidden, strict=True)
    ]
    return finish(figure, f"Communication per rank and step (medians): {listing(said)}.")


def _hidden(share: float, comm_us: float) -> str:
    if np.isnan(share):
        return "not known" if comm_us > 0 else "no communication"
    return f"{format_percent(share)} hidden"
