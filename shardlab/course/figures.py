"""Figures of notebooks and workbench alone: sweeps over sizes, the ranks of a mesh, the change between two runs."""

from collections.abc import Callable, Mapping
from itertools import product
from math import isnan, nan, prod
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.plots import theme
from shardlab.plots.text import emulated_note, format_bytes, format_count, format_us, joined, listing, tick

PREDICTED = "predicted"
NAMED_CHANGE = 0.5  # percent: smaller changes count as none
# Column of a summary -> its name in the figure, and how its values are written.
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_ms": ("time of a step", lambda value: format_us(1e3 * value)),
    "exposed_comm_ms": ("exposed communication", lambda value: format_us(1e3 * value)),
    "peak_bytes": ("peak", format_bytes),
    "parameter_bytes": ("parameters", format_bytes),
    "gradient_bytes": ("gradients", format_bytes),
    "optimizer_bytes": ("optimizer state", format_bytes),
    "wire_bytes_per_step": ("bytes to send", format_bytes),
}


def _by(table: pd.DataFrame, name: str, size: str) -> dict[str, pd.DataFrame]:
    """The rows of each name in order of their size."""
    return {str(key): rows.sort_values(size, kind="stable") for key, rows in table.groupby(name, sort=False)}


def message_times(messages: pd.DataFrame) -> go.Figure:
    """Measured times as marks and the fitted model as a line, both axes logarithmic.

    Args:
        messages: columns ``op`` (a collective, or any name), ``bytes``, ``time_us``, ``fitted_us``
            (from ``analysis.with_fit``); sizes and times above zero. An optional column ``source`` says whether the
            link was emulated.
    """
    note = joined(emulated_note(messages), "marks: measured; lines: fixed cost + bytes / bandwidth")
    figure, parts = theme.new_figure("Time of a message against its size", note), []
    curves = _by(messages, "op", "bytes")
    colours = theme.run_colours(curves) | theme.COLLECTIVE_COLOURS
    for place, (op, rows) in enumerate(curves.items()):
        sent, ends = rows["bytes"].to_numpy(dtype=np.float64), rows.iloc[[0, -1]].to_dict("records")
        # The model is affine, so interpolating between its values is exact; on logarithmic axes it is a curve.
        sizes = np.geomspace(sent[0], sent[-1], 80)
        fitted = np.interp(sizes, sent, rows["fitted_us"].to_numpy(dtype=np.float64))
        figure.add_scatter(x=sizes, y=fitted, mode="lines", line_color=colours[op], showlegend=False, hoverinfo="skip")
        figure.add_scatter(
            x=sent, y=rows["time_us"].to_numpy(), mode="markers", name=op.replace("_", " "),
            marker={"color": colours[op], "symbol": theme.SYMBOLS[place % len(theme.SYMBOLS)], "size": 10},
            text=[format_us(time) for time in rows["time_us"]], customdata=sent / rows["time_us"].to_numpy() / 1e3,
            hovertemplate=f"<b>{op}</b><br>%{{x:.3s}}B in %{{text}}<br>%{{customdata:.3g}} GB/s<extra></extra>",
        )  # fmt: skip
        words = [f"{format_us(row['time_us'])} for {format_bytes(row['bytes'])}" for row in ends]
        parts.append(f"{op} {' and '.join(words)}")
    times = [*messages["time_us"], *messages["fitted_us"]]
    figure.update_xaxes(theme.log_axis(messages["bytes"].tolist(), lambda size: tick(format_bytes(size))))
    figure.update_yaxes(theme.log_axis(times, lambda time: tick(format_us(time))), title_text="time of a message")
    figure.update_xaxes(title_text="size of a message")
    return theme.finish(figure, f"Time of a message: {listing(parts)}.")


def bucket_curve(buckets: pd.DataFrame) -> go.Figure:
    """Two panels over the bucket size, time of a step and exposed communication; a ring marks the best size.

    Args:
        buckets: columns ``bucket_bytes``, ``step_us``, ``exposed_comm_us``, ``run``; the median of rows with the same
            run and size is drawn.
    """
    medians = buckets.groupby(["run", "bucket_bytes"], sort=False)[["step_us", "exposed_comm_us"]].median()
    note = joined(emulated_note(buckets), "medians" * (len(medians) < len(buckets)), "the ring marks the shortest step")
    figure = theme.new_figure("Step time against bucket size", note).update_layout(height=560)
    figure, parts = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, figure=figure), []
    curves = _by(medians.reset_index(), "run", "bucket_bytes")
    for place, (run, colour) in enumerate(theme.run_colours(curves).items()):
        for row, column in ((1, "step_us"), (2, "exposed_comm_us")):
            figure.add_scatter(
                x=curves[run]["bucket_bytes"].to_numpy(), y=(curves[run][column] / 1e3).to_numpy(), name=run,
                mode="lines+markers", line_color=colour, legendgroup=run, showlegend=row == 1,
                marker={"size": 9, "symbol": theme.SYMBOLS[place % len(theme.SYMBOLS)]}, row=row, col=1,
                hovertemplate=f"<b>{run}</b><br>bucket %{{x:.3s}}B<br>%{{y:.3g}} ms<extra></extra>",
            )  # fmt: skip
        best = curves[run].sort_values("step_us", kind="stable").iloc[0]
        ring = {"symbol": "circle-open", "size": 19, "color": colour, "line": {"width": 2.5}}
        at = {"x": [best["bucket_bytes"]], "y": [best["step_us"] / 1e3], "row": 1, "col": 1}
        figure.add_scatter(mode="markers", marker=ring, showlegend=False, hoverinfo="skip", **at)
        parts.append(
            f"{run} is fastest with buckets of {format_bytes(best['bucket_bytes'])}: "
            f"{format_us(best['step_us'])} a step, {format_us(best['exposed_comm_us'])} exposed"
        )
    tried = sorted(buckets["bucket_bytes"].unique())
    sizes = tried[:: 1 + len(tried) // 10]
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[tick(format_bytes(size)) for size in sizes])
    figure.update_xaxes(title_text="bucket size (bytes, logarithmic)", row=2)
    for row, words in ((1, "step (ms)"), (2, "exposed (ms)")):
        figure.update_yaxes(title_text=words, rangemode="tozero", row=row)
    parts[-1] += f". Sizes from {format_bytes(tried[0])} to {format_bytes(tried[-1])}."
    return theme.finish(figure, "; ".join(parts))


def throughput(table: pd.DataFrame) -> go.Figure:
    """Tokens per second of all ranks together over the rows of one rank, both axes logarithmic.

    Args:
        table: columns ``run``, ``source`` ('predicted' is drawn as a line, everything else as markers), ``rows``
            (sequences of one rank in a step), ``tokens_per_s``; both numbers above zero.
    """
    kinds = [kind for kind in dict.fromkeys(map(str, table["source"])) if kind not in (PREDICTED, "emulated")]
    marked = " and ".join(kinds) or "measured"
    note = joined(emulated_note(table), f"marks: {marked}; lines: predicted")
    figure, parts = theme.new_figure("Throughput against the batch of a rank", note), []
    is_line = table["source"] == PREDICTED
    lines, marks = (_by(rows, "run", "rows") for rows in (table[is_line], table[~is_line]))
    for place, (run, colour) in enumerate(theme.run_colours(map(str, table["run"])).items()):
        symbol = {"symbol": theme.SYMBOLS[place % len(theme.SYMBOLS)], "size": 11}
        for curves, mode, kind in ((lines, "lines", PREDICTED), (marks, "markers", marked)):
            if run in curves:
                figure.add_scatter(
                    x=curves[run]["rows"].to_numpy(), y=curves[run]["tokens_per_s"].to_numpy(), mode=mode, name=run,
                    line_color=colour, marker=symbol | {"color": colour}, legendgroup=run, showlegend=curves is marks,
                    hovertemplate=f"{run}, {kind}<br>%{{x}} rows a rank<br>%{{y:.3s}} tokens a second<extra></extra>",
                )  # fmt: skip
        if run in marks:
            first, last = marks[run].iloc[[0, -1]].to_dict("records")
            parts.append(
                f"{run} {format_count(first['tokens_per_s'])} with {first['rows']:g} rows a rank and "
                f"{format_count(last['tokens_per_s'])} with {last['rows']:g}"
            )
    sizes = sorted((table if is_line.all() else table[~is_line])["rows"].unique())
    figure.update_xaxes(type="log", title_text="rows of a rank in a step (logarithmic)", tickvals=sizes, ticktext=sizes)
    figure.update_yaxes(theme.log_axis(table["tokens_per_s"].tolist(), lambda speed: tick(format_count(speed))))
    figure.update_yaxes(title_text="tokens a second, all ranks")
    return theme.finish(figure, f"Tokens a second: {listing(parts)}.")


def mesh_map(axes: Mapping[str, int], hosts: int = 1) -> go.Figure:
    """The ranks in a grid; a band joins the ranks of a group, in the colour of its axis.

    Args:
        axes: size of both axes by name, the outer one first, as ``Mesh`` takes it.
        hosts: number of machines, each with consecutive ranks; with several, each rank is labelled with its host.
    """
    (outer, height), (inner, width) = axes.items()
    grid = np.arange(height * width).reshape(height, width)
    shape = " x ".join(f"{name} {size}" for name, size in axes.items())
    figure, parts = theme.new_figure("The mesh", f"{shape}; a band is a group"), []
    for name, groups in ((outer, grid.T.tolist()), (inner, grid.tolist())):
        drawn = [rank for group in groups for rank in (*group, None)]  # None: the band ends
        x = [None if rank is None else rank % width for rank in drawn]
        y = [None if rank is None else rank // width for rank in drawn]
        line = {"color": theme.AXIS_COLOURS.get(name, theme.INK), "width": 26}
        figure.add_scatter(x=x, y=y, mode="lines", line=line, name=f"{name} groups", hoverinfo="skip")
        parts.append(f"{name} groups {listing([','.join(map(str, group)) for group in groups])}")
    places, per_host = list(product(range(height), range(width))), prod(axes.values()) // hosts
    figure.add_scatter(
        x=[column for _, column in places], y=[row for row, _ in places], mode="markers+text", name="ranks",
        marker={"size": 60, "color": "#5d6878", "line": {"color": "rgba(255,255,255,0.75)", "width": 2}},
        text=[f"<b>{rank}</b>" + f"<br><sup>host {rank // per_host}</sup>" * (hosts > 1) for rank in grid.flat],
        textfont={"color": "#ffffff", "size": 15}, showlegend=False,
        hovertext=[f"{outer} {row}, {inner} {column}" for row, column in places], hoverinfo="text",
    )  # fmt: skip
    figure.update_layout(height=190 + 120 * height, margin_t=120)
    plain: dict[str, Any] = {"showgrid": False, "zeroline": False, "constrain": "domain"}
    columns, rows = ([f"{name} {place}" for place in range(size)] for name, size in ((inner, width), (outer, height)))
    figure.update_xaxes(range=[-0.6, width - 0.4], side="top", tickvals=list(range(width)), ticktext=columns, **plain)
    # Equal scales: neighbours are equally near in both directions.
    alike = plain | {"scaleanchor": "x", "scaleratio": 0.6}
    figure.update_yaxes(range=[height - 0.4, -0.6], tickvals=list(range(height)), ticktext=rows, **alike)
    return theme.finish(figure, f"A mesh of {grid.size} ranks, {shape}: {'; '.join(parts[::-1])}.")


def run_difference(before: "pd.Series[Any]", after: "pd.Series[Any]", names: tuple[str, str]) -> go.Figure:
    """Change of each cost from one run to another, in percent.

    Args:
        before: of the first, a row of the summary of a comparison.
        after: of the second.
        names: of the two, for titles.
    """
    title, rows = f"Change from {names[0]} to {names[1]}", []
    for column, (cost, written) in COSTS.items():
        one, other = (nan if pd.isna(run[column]) else float(run[column]) for run in (before, after))
        percent = 0.0 if one == other else 100 * (other / one - 1) if one else nan
        rows.append((cost, written(one), written(other), percent))
    table = pd.DataFrame(rows, columns=["cost", "before", "after", "percent"])
    is_moved = (table["before"] != table["after"]) & ~(table["percent"].abs() < NAMED_CHANGE)
    moved, same = table[is_moved], listing(table.loc[~is_moved, "cost"].tolist())
    if moved.empty:
        return theme.nothing(title, f"nothing changed: {same}")
    figure = theme.new_figure(title, f"unchanged: {same}" if len(moved) < len(table) else "left: less; right: more")
    words = [
        f"{change:+.0f} %".replace("-", "\u2212") if not isnan(change) else "not known" for change in moved["percent"]
    ]
    lengths = moved["percent"].fillna(0.0)
    figure.add_bar(
        x=lengths.to_numpy(), y=moved["cost"].tolist(), orientation="h", text=words, textposition="outside",
        cliponaxis=False, marker_color=theme.run_colours([after["strategy"]])[after["strategy"]],
        customdata=moved[["before", "after"]].to_numpy().tolist(),
        hovertemplate="%{y}<br>%{customdata[0]} → %{customdata[1]}<extra></extra>",
    )  # fmt: skip
    figure.add_vline(x=0, line={"color": theme.INK, "width": 1.5}).update_layout(height=200 + 44 * len(moved))
    beside = 0.3 * max(10.0, float(lengths.abs().max()))
    bounds = [min(0.0, float(lengths.min())) - beside, max(0.0, float(lengths.max())) + beside]
    figure.update_xaxes(title_text="change", range=bounds, ticksuffix=" %")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    said = [f"{row['cost']} {row['before']} to {row['after']}" for row in moved.to_dict("records")]
    return theme.finish(figure, f"{title}: {listing(said)}.")
