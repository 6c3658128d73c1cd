"""Time of a message against its size, with the latency-bandwidth line through it."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.colours import COLLECTIVE_COLOURS, run_colours
from shardlab.plots.labels import emulated_note, joined, listing
from shardlab.plots.loss import SYMBOLS
from shardlab.plots.theme import finish, log_axis, new_figure, nothing
from shardlab.plots.units import format_bytes, format_us, tick

TITLE = "Time of a message against its size"
READ_AS = "marks: measured; lines: latency + bytes / bandwidth"
COLUMNS = ("op", "bytes", "time_us", "fitted_us")


def message_times(messages: pd.DataFrame) -> go.Figure:
    """Measured times as marks and the fitted model as a line, both axes logarithmic.

    Args:
        messages: columns ``op`` (a collective, or any name), ``bytes``, ``time_us``, ``fitted_us``
            (from ``analysis.with_fit``); sizes and times above zero. ``source``, where there is one, says whether the
            link was emulated.

    Raises:
        ValueError: a column is missing, or a size or time is not above zero.
    """
    missing = [name for name in COLUMNS if name not in messages.columns]
    if missing:
        raise ValueError(f"messages: missing columns {missing}; needs {', '.join(COLUMNS)}")
    if not len(messages):
        return nothing(TITLE, "no messages measured")
    if not (messages[["bytes", "time_us", "fitted_us"]] > 0).all(axis=None):
        raise ValueError("messages: bytes, time_us and fitted_us must be above 0 for logarithmic axes")
    figure = new_figure(TITLE, joined(emulated_note(messages), READ_AS))
    ops = [str(op) for op in messages["op"].drop_duplicates()]
    colours = run_colours(ops) | {str(op): colour for op, colour in COLLECTIVE_COLOURS.items()}
    for place, op in enumerate(ops):
        rows = messages[messages["op"] == op].sort_values("bytes", kind="stable")
        _draw(figure, op, (colours[op], SYMBOLS[place % len(SYMBOLS)]), rows)
    sizes = log_axis(messages["bytes"].tolist(), lambda size: tick(format_bytes(size)))
    times = log_axis([*messages["time_us"], *messages["fitted_us"]], lambda time: tick(format_us(time)))
    figure.update_xaxes(title_text="size of a message", **sizes)
    figure.update_yaxes(title_text="time of a message", **times)
    return finish(figure, _summary(messages, ops))


def _draw(figure: go.Figure, op: str, style: tuple[str, str], rows: pd.DataFrame) -> None:
    colour, symbol = style
    rate = rows["bytes"] / rows["time_us"] / 1e3
    # the model is affine in the size, so straight lines between its values ARE the model: drawn finely they curve here
    sizes = np.geomspace(rows["bytes"].iloc[0], rows["bytes"].iloc[-1], 80)
    figure.add_scatter(
        x=sizes,
        y=np.interp(sizes, rows["bytes"].to_numpy(dtype=np.float64), rows["fitted_us"].to_numpy(dtype=np.float64)),
        mode="lines",
        name=f"{op}: fit",
        legendgroup=op,
        showlegend=False,
        hoverinfo="skip",
        line={"color": colour, "width": 2.5},
    )
    figure.add_scatter(
        x=rows["bytes"].to_numpy(),
        y=rows["time_us"].to_numpy(),
        mode="markers",
        name=op.replace("_", " "),
        legendgroup=op,
        marker={"color": colour, "symbol": symbol, "size": 10},
        customdata=np.column_stack(
            [[format_bytes(size) for size in rows["bytes"]], [format_us(time) for time in rows["time_us"]],
             [format_us(time) for time in rows["fitted_us"]], [f"{value:.3g}" for value in rate]]
        ).tolist(),
        hovertemplate=f"<b>{op}</b><br>%{{customdata[0]}} in %{{customdata[1]}} (fit %{{customdata[2]}})"
        "<br>%{customdata[3]} GB/s<extra></extra>",
    )  # fmt: skip


def _summary(messages: pd.DataFrame, ops: list[str]) -> str:
    parts = []
    for op in ops:
        rows = messages[messages["op"] == op].sort_values("bytes", kind="stable")
        small, large = rows.iloc[0], rows.iloc[-1]
        parts.append(
            f"{op} {format_us(small['time_us'])} for {format_bytes(small['bytes'])}"
            f" and {format_us(large['time_us'])} for {format_bytes(large['bytes'])}"
        )
    return f"Time of a message: {listing(parts)}."
