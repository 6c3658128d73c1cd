"""Step time and exposed communication against the size of a bucket: small ones cost latency, large ones overlap."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.plots.colours import run_colours
from shardlab.plots.labels import emulated_note, joined
from shardlab.plots.loss import SYMBOLS
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import format_bytes, format_us, tick

TITLE = "Step time against bucket size"
COLUMNS = ("bucket_bytes", "step_us", "exposed_comm_us", "run")


def bucket_curve(buckets: pd.DataFrame) -> go.Figure:
    """Two panels over the bucket size: time of a step, and communication that nothing hid; the best size is ringed.

    Args:
        buckets: columns ``bucket_bytes``, ``step_us``, ``exposed_comm_us``, ``run``; of several rows with the same run
            and size the median is drawn.

    Raises:
        ValueError: a column is missing, or a size is not above zero.
    """
    missing = [name for name in COLUMNS if name not in buckets.columns]
    if missing:
        raise ValueError(f"buckets: missing columns {missing}; needs {', '.join(COLUMNS)}")
    if not len(buckets):
        return nothing(TITLE, "no bucket sizes measured")
    if not (buckets["bucket_bytes"] > 0).all():
        raise ValueError("buckets: bucket_bytes must be above 0 for a logarithmic axis")
    table = buckets.groupby(["run", "bucket_bytes"])[["step_us", "exposed_comm_us"]].median().reset_index()
    figure = _panels()
    middle = "medians" if len(table) < len(buckets) else ""
    words = joined(emulated_note(buckets), middle, "the ring marks the shortest step")
    figure.update_layout(title_subtitle_text=words)
    runs = [str(run) for run in buckets["run"].drop_duplicates()]
    for place, (run, colour) in enumerate(run_colours(runs).items()):
        rows = table[table["run"] == run]
        for panel, column in ((1, "step_us"), (2, "exposed_comm_us")):
            figure.add_trace(_line(rows, column, run, (colour, SYMBOLS[place % len(SYMBOLS)])), row=panel, col=1)
        _ring(figure, rows, colour)
    sizes = sorted(table["bucket_bytes"].unique())
    sizes = sizes[:: 1 + len(sizes) // 10]
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[tick(format_bytes(size)) for size in sizes])
    return finish(figure, _summary(table, runs))


def _panels() -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.55, 0.45])
    look = new_figure(TITLE)
    figure.update_layout(template=look.layout.template, title=look.layout.title, height=560)
    figure.update_xaxes(title_text="bucket size (bytes, logarithmic)", row=2, col=1)
    figure.update_yaxes(title_text="step (ms)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="exposed (ms)", rangemode="tozero", row=2, col=1)
    return figure


def _line(rows: pd.DataFrame, column: str, run: str, style: tuple[str, str]) -> go.Scatter:
    words = "step" if column == "step_us" else "exposed communication"
    return go.Scatter(
        x=rows["bucket_bytes"].to_numpy(),
        y=(rows[column] / 1e3).to_numpy(),
        mode="lines+markers",
        name=run,
        legendgroup=run,
        showlegend=column == "step_us",
        line={"color": style[0], "width": 2.5},
        marker={"size": 9, "symbol": style[1]},
        customdata=[[format_bytes(size), format_us(time)] for size, time in zip(rows["bucket_bytes"], rows[column],
                                                                                  strict=True)],
        hovertemplate=f"<b>{run}</b><br>bucket %{{customdata[0]}}<br>{words} %{{customdata[1]}}<extra></extra>",
    )  # fmt: skip


def _ring(figure: go.Figure, rows: pd.DataFrame, colour: str) -> None:
    best = rows.sort_values("step_us", kind="stable").iloc[0]
    figure.add_scatter(
        x=[best["bucket_bytes"]],
        y=[best["step_us"] / 1e3],
        mode="markers",
        name="shortest step",
        marker={"symbol": "circle-open", "size": 19, "color": colour, "line": {"width": 2.5}},
        hoverinfo="skip",
        showlegend=False,
        row=1,
        col=1,
    )


def _summary(table: pd.DataFrame, runs: list[str]) -> str:
    parts = []
    for run in runs:
        rows = table[table["run"] == run]
        best = rows.sort_values("step_us", kind="stable").iloc[0]
        parts.append(
            f"{run} is fastest with buckets of {format_bytes(best['bucket_bytes'])}: "
            f"{format_us(best['step_us'])} a step, {format_us(best['exposed_comm_us'])} exposed"
        )
    low, high = table["bucket_bytes"].min(), table["bucket_bytes"].max()
    return f"{'; '.join(parts)}. Sizes from {format_bytes(low)} to {format_bytes(high)}."
