"""The bars of a timeline: rows merged where a screen could not tell them apart, and what each says on hover."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.colours import readable_on
from shardlab.plots.nesting import MAX_BARS, thin
from shardlab.plots.stack import gaps
from shardlab.plots.units import format_bytes, format_us

MAX_NAMED = 200  # beyond, no bar is wide enough for its name
Row = Mapping[str, Any]
Describe = Callable[[Row], str]


def grouped(rows: pd.DataFrame, what: str, describe: Describe, extent: tuple[float, float]) -> pd.DataFrame:
    """Bars for rows with ``y``, ``start_us``, ``end_us``: one for each, or one for many in a column of the screen.

    Args:
        rows: spans or collectives of one trace.
        what: column that names a bar: ``unit`` or ``tag``.
        describe: what a bar says on hover.
        extent: (begin, length) of the picture in microseconds.

    Returns:
        ``y``, ``start`` and ``length`` (ms from the begin), ``count`` (rows a bar stands for), ``name`` (written in the
        bar), ``text`` (shown on hover).
    """
    start = rows["start_us"].to_numpy(dtype=np.float64) - extent[0]
    end = rows["end_us"].to_numpy(dtype=np.float64) - extent[0]
    y = rows["y"].to_numpy(dtype=np.float64)
    group = np.arange(len(rows))
    if len(rows) > MAX_BARS:  # else there is a column of the screen for each
        for lane in np.unique(y):
            here = np.flatnonzero(y == lane)
            group[here] = here[thin(start[here], end[here], extent[1])]
    _, first, place, count = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    begins, ends = np.full(len(first), np.inf), np.full(len(first), -np.inf)
    np.minimum.at(begins, place, start)
    np.maximum.at(ends, place, end)
    alone = rows.iloc[first[count == 1]].to_dict("records")
    texts, names = iter([describe(row) for row in alone]), iter([written(str(row[what])) for row in alone])
    return pd.DataFrame({
        "y": y[first], "start": begins / 1e3, "length": (ends - begins) / 1e3, "count": count,
        "name": [next(names) if number == 1 else "" for number in count],
        "text": [next(texts) if number == 1 else f"<b>{number} merged</b>: zoomed out too far to tell them apart"
                 for number in count],
    })  # fmt: skip


def written(name: str) -> str:
    """What of a name fits into a bar: of 'gradients of bucket 0' the colour of the bar says what moves."""
    return name.rpartition(" of ")[2]


def bars(merged: pd.DataFrame, name: str, colour: str, width: float) -> go.Bar:
    """All bars of one kind as one trace."""
    start, length = (merged[column].to_numpy(dtype=np.float64) for column in ("start", "length"))
    return go.Bar(
        base=start,
        x=length,
        y=merged["y"].to_numpy(),
        width=width,
        orientation="h",
        name=name,
        marker={"color": colour, "line": gaps(length, float((start + length).max(initial=0.0)))},
        text=merged["name"].tolist() if len(merged) <= MAX_NAMED else None,
        textposition="inside",
        insidetextanchor="middle",
        insidetextfont={"color": readable_on(colour)},
        textangle=0,
        hovertext=merged["text"].tolist(),
        hovertemplate="%{hovertext}<extra></extra>",
    )


def strips(merged: pd.DataFrame, name: str, colour: str) -> go.Bar:
    """Thin bars below those that ``bars`` draws: times in which nothing moved."""
    trace = bars(merged.assign(y=merged["y"] + 0.38), name, colour, 0.14)
    return trace.update(text=None, marker_line=None)


def describe_span(row: Row) -> str:
    """A unit at work."""
    return f"<b>{row['unit'] or 'model'}</b>: {row['kind']}, rank {row['rank']}<br>{_length(row, 'start_us', 'end_us')}"


def describe_wait(row: Row) -> str:
    """A stretch in which a rank did nothing but wait."""
    return f"<b>rank {row['rank']} waits</b> for {row['tag']}<br>{_length(row, 'start_us', 'end_us')}"


def describe_queue(row: Row) -> str:
    """The time from the issue of a collective to its beginning."""
    return f"<b>queued</b>: {row['tag']}<br>{_length(row, 'start_us', 'end_us')}"


def describe_collective(row: Row) -> str:
    """What moved, how much, how fast, and who waited for it."""
    speed = float(row["bus_gb_per_s"])
    waited: bool = pd.notna(row["wait_start_us"]) and pd.notna(row["wait_end_us"])
    lines = [
        f"<b>{row['op']}</b>: {row['tag']}, rank {row['rank']} of {row['group_size']} on {row['axis']}",
        f"{format_bytes(float(row['bytes']))} {row['dtype']}, sends {format_bytes(float(row['wire_bytes']))}",
        f"took {_length(row, 'start_us', 'end_us')}" + ("" if np.isnan(speed) else f", bus {speed:.3g} GB/s"),
        f"queued {_length(row, 'issue_us', 'start_us')}",
        f"the rank waited {_length(row, 'wait_start_us', 'wait_end_us')}" if waited else "the rank never waited for it",
        f"transport {row['transport']}, issued in {row['phase']}",
    ]
    return "<br>".join(lines)


def _length(row: Row, start: str, end: str) -> str:
    return format_us(float(row[end]) - float(row[start]))
