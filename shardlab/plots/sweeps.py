"""Measurements over a range of sizes: time of a message, step time by bucket size, throughput by batch size."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.analysis.rows import require_columns
from shardlab.plots.text import emulated_note, format_bytes, format_count, format_us, joined, listing, tick
from shardlab.plots.theme import COLLECTIVE_COLOURS, SYMBOLS, finish, log_axis, new_figure, nothing, run_colours

MESSAGES = "Time of a message against its size"
READ_AS = "marks: measured; lines: latency + bytes / bandwidth"
MESSAGE_COLUMNS = ("op", "bytes", "time_us", "fitted_us")
BUCKETS = "Step time against bucket size"
BUCKET_COLUMNS = ("bucket_bytes", "step_us", "exposed_comm_us", "run")
THROUGHPUT = "Throughput against the batch of a rank"
THROUGHPUT_COLUMNS = ("run", "source", "rows", "tokens_per_s")
PREDICTED = "predicted"


def message_times(messages: pd.DataFrame) -> go.Figure:
    """Measured times as marks and the fitted model as a line, both axes logarithmic.

    Args:
        messages: columns ``op`` (a collective, or any name), ``bytes``, ``time_us``, ``fitted_us``
            (from ``analysis.with_fit``); sizes and times above zero. An optional column ``source`` says whether the
            link was emulated.

    Raises:
        ValueError: a column is missing, or a size or time is not above zero.
    """
    require_columns(messages, MESSAGE_COLUMNS, "messages")
    if not len(messages):
        return nothing(MESSAGES, "no messages measured")
    if not (messages[["bytes", "time_us", "fitted_us"]] > 0).all(axis=None):
        raise ValueError("messages: bytes, time_us and fitted_us must be above 0 for logarithmic axes")
    figure = new_figure(MESSAGES, joined(emulated_note(messages), READ_AS))
    curves = _by(messages, "op", "bytes")
    colours = run_colours(curves) | COLLECTIVE_COLOURS
    for place, (op, rows) in enumerate(curves.items()):
        _draw_messages(figure, op, (colours[op], SYMBOLS[place % len(SYMBOLS)]), rows)
    sizes = log_axis(messages["bytes"].tolist(), lambda size: tick(format_bytes(size)))
    times = log_axis([*messages["time_us"], *messages["fitted_us"]], lambda time: tick(format_us(time)))
    figure.update_xaxes(title_text="size of a message", **sizes)
    figure.update_yaxes(title_text="time of a message", **times)
    parts = []
    for op, rows in curves.items():
        ends = rows.iloc[[0, -1]].to_dict("records")
        words = [f"{format_us(row['time_us'])} for {format_bytes(row['bytes'])}" for row in ends]
        parts.append(f"{op} {' and '.join(words)}")
    return finish(figure, f"Time of a message: {listing(parts)}.")


def _by(table: pd.DataFrame, name: str, size: str) -> dict[str, pd.DataFrame]:
    """The rows of each name in order of their size."""
    return {str(key): rows.sort_values(size, kind="stable") for key, rows in table.groupby(name, sort=False)}


def _draw_messages(figure: go.Figure, op: str, style: tuple[str, str], rows: pd.DataFrame) -> None:
    colour, symbol = style
    rate = rows["bytes"] / rows["time_us"] / 1e3
    # The model is affine in the size, so interpolating between its values is exact; on logarithmic axes it is a curve.
    sizes = np.geomspace(rows["bytes"].iloc[0], rows["bytes"].iloc[-1], 80)
    figure.add_scatter(
        x=sizes,
        y=np.interp(sizes, rows["bytes"].to_numpy(dtype=np.float64), rows["fitted_us"].to_numpy(dtype=np.float64)),
        mode="lines", name=f"{op}: fit", legendgroup=op, showlegend=False, hoverinfo="skip",
        line={"color": colour, "width": 2.5},
    )  # fmt: skip
    figure.add_scatter(
        x=rows["bytes"].to_numpy(), y=rows["time_us"].to_numpy(), mode="markers", name=op.replace("_", " "),
        legendgroup=op,
        marker={"color": colour, "symbol": symbol, "size": 10},
        customdata=np.column_stack(
            [[format_bytes(size) for size in rows["bytes"]], [format_us(time) for time in rows["time_us"]],
             [format_us(time) for time in rows["fitted_us"]], [f"{value:.3g}" for value in rate]]
        ).tolist(),
        hovertemplate=f"<b>{op}</b><br>%{{customdata[0]}} in %{{customdata[1]}} (fit %{{customdata[2]}})"
        "<br>%{customdata[3]} GB/s<extra></extra>",
    )  # fmt: skip


def bucket_curve(buckets: pd.DataFrame) -> go.Figure:
    """Two panels over the bucket size, time of a step and exposed communication; a ring marks the best size.

    Args:
        buckets: columns ``bucket_bytes``, ``step_us``, ``exposed_comm_us``, ``run``; the median of rows with the same
            run and size is drawn.

    Raises:
        ValueError: a column is missing, or a size is not above zero.
    """
    require_columns(buckets, BUCKET_COLUMNS, "buckets")
    if not len(buckets):
        return nothing(BUCKETS, "no bucket sizes measured")
    if not (buckets["bucket_bytes"] > 0).all():
        raise ValueError("buckets: bucket_bytes must be above 0 for a logarithmic axis")
    table = buckets.groupby(["run", "bucket_bytes"])[["step_us", "exposed_comm_us"]].median().reset_index()
    figure = _panels()
    middle = "medians" if len(table) < len(buckets) else ""
    words = joined(emulated_note(buckets), middle, "the ring marks the shortest step")
    figure.update_layout(title_subtitle_text=words)
    curves = _by(table, "run", "bucket_bytes")
    runs = [str(run) for run in buckets["run"].drop_duplicates()]
    best = {run: curves[run].sort_values("step_us", kind="stable").iloc[0] for run in runs}
    for place, (run, colour) in enumerate(run_colours(runs).items()):
        for panel, column in ((1, "step_us"), (2, "exposed_comm_us")):
            style = (colour, SYMBOLS[place % len(SYMBOLS)])
            figure.add_trace(_line(curves[run], column, run, style), row=panel, col=1)
        _ring(figure, best[run], colour)
    tried = sorted(table["bucket_bytes"].unique())
    sizes = tried[:: 1 + len(tried) // 10]
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[tick(format_bytes(size)) for size in sizes])
    return finish(figure, _bucket_summary(best, tried[0], tried[-1]))


def _panels() -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.55, 0.45])
    look = new_figure(BUCKETS)
    figure.update_layout(template=look.layout.template, title=look.layout.title, height=560)
    figure.update_xaxes(title_text="bucket size (bytes, logarithmic)", row=2, col=1)
    figure.update_yaxes(title_text="step (ms)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="exposed (ms)", rangemode="tozero", row=2, col=1)
    return figure


def _line(rows: pd.DataFrame, column: str, run: str, style: tuple[str, str]) -> go.Scatter:
    words = "step" if column == "step_us" else "exposed communication"
    return go.Scatter(
        x=rows["bucket_bytes"].to_numpy(), y=(rows[column] / 1e3).to_numpy(), mode="lines+markers",
        name=run, legendgroup=run, showlegend=column == "step_us",
        line={"color": style[0], "width": 2.5},
        marker={"size": 9, "symbol": style[1]},
        customdata=[[format_bytes(size), format_us(time)] for size, time in zip(rows["bucket_bytes"], rows[column],
                                                                                  strict=True)],
        hovertemplate=f"<b>{run}</b><br>bucket %{{customdata[0]}}<br>{words} %{{customdata[1]}}<extra></extra>",
    )  # fmt: skip


def _ring(figure: go.Figure, best: "pd.Series[Any]", colour: str) -> None:
    figure.add_scatter(
        x=[best["bucket_bytes"]], y=[best["step_us"] / 1e3], mode="markers", name="shortest step",
        marker={"symbol": "circle-open", "size": 19, "color": colour, "line": {"width": 2.5}}, hoverinfo="skip",
        showlegend=False, row=1, col=1,
    )  # fmt: skip


def _bucket_summary(best: "dict[str, pd.Series[Any]]", smallest: float, largest: float) -> str:
    parts = [
        f"{run} is fastest with buckets of {format_bytes(row['bucket_bytes'])}: "
        f"{format_us(row['step_us'])} a step, {format_us(row['exposed_comm_us'])} exposed"
        for run, row in best.items()
    ]
    return f"{'; '.join(parts)}. Sizes from {format_bytes(smallest)} to {format_bytes(largest)}."


def throughput(table: pd.DataFrame) -> go.Figure:
    """Tokens per second of all ranks together over the rows of one rank, both axes logarithmic.

    Args:
        table: columns ``run``, ``source`` ('predicted' is drawn as a line, everything else as markers), ``rows``
            (sequences of one rank in a step), ``tokens_per_s``; both numbers above zero.

    Raises:
        ValueError: a column is missing, or a number is not above zero.
    """
    require_columns(table, THROUGHPUT_COLUMNS, "table")
    if table.empty:
        return nothing(THROUGHPUT, "nothing measured")
    if not (table[["rows", "tokens_per_s"]] > 0).all(axis=None):
        raise ValueError("table: rows and tokens_per_s must be above 0 for logarithmic axes")
    figure = new_figure(THROUGHPUT, joined(emulated_note(table), "marks: measured; lines: predicted"))
    is_line = table["source"] == PREDICTED
    lines, marks = (_by(rows, "run", "rows") for rows in (table[is_line], table[~is_line]))
    for place, (run, colour) in enumerate(run_colours(map(str, table["run"])).items()):
        for curves, symbol in ((lines, None), (marks, SYMBOLS[place % len(SYMBOLS)])):
            if run in curves:
                figure.add_trace(_trace(curves[run], run, colour, symbol))
    sizes = sorted((table if is_line.all() else table[~is_line])["rows"].unique())
    figure.update_xaxes(type="log", title_text="rows of a rank in a step (logarithmic)", tickvals=sizes, ticktext=sizes)
    speeds = log_axis(table["tokens_per_s"].tolist(), lambda speed: tick(format_count(speed)))
    figure.update_yaxes(title_text="tokens a second, all ranks", **speeds)
    parts = []
    for run in dict.fromkeys(map(str, table["run"])):
        if run in marks:
            first, last = marks[run].iloc[[0, -1]].to_dict("records")
            parts.append(
                f"{run} {format_count(first['tokens_per_s'])} with {first['rows']:g} rows a rank and "
                f"{format_count(last['tokens_per_s'])} with {last['rows']:g}"
            )
    return finish(figure, f"Tokens a second: {listing(parts)}.")


def _trace(rows: pd.DataFrame, run: str, colour: str, symbol: str | None) -> go.Scatter:
    kind = PREDICTED if symbol is None else "measured"
    trace = go.Scatter(
        x=rows["rows"].to_numpy(), y=rows["tokens_per_s"].to_numpy(), mode="lines" if symbol is None else "markers",
        name=run if symbol is not None else f"{run}, predicted", legendgroup=run, showlegend=symbol is not None,
        customdata=[tick(format_count(value)) for value in rows["tokens_per_s"]],
        hovertemplate=f"<b>{run}</b>, {kind}<br>%{{x}} rows a rank<br>%{{customdata}} tokens a second<extra></extra>",
    )  # fmt: skip
    style = {"line": {"color": colour, "width": 2.5}} if symbol is None else {
        "marker": {"color": colour, "symbol": symbol, "size": 11}
    }  # fmt: skip
    return trace.update(style)
