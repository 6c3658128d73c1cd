"""The bars of a timeline: rows merged where a screen could not tell them apart, and what each says on hover."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.nesting import thin
from shardlab.plots.stack import GAP
from shardlab.plots.units import format_bytes, format_us

MAX_NAMED = 200  # beyond, no bar is wide enough for its name


def grouped(rows: pd.DataFrame, what: str, extent: tuple[float, float]) -> pd.DataFrame:
    """Bars for rows with ``y``, ``start_us``, ``end_us``: one for each, or one for many in a column of the screen.

    Args:
        rows: spans or collectives of one trace.
        what: column that names a bar: ``unit`` or ``tag``.
        extent: (begin, length) of the picture in microseconds.

    Returns:
        ``y``, ``start`` and ``length`` (ms from the begin), ``name`` (written in the bar), ``text`` (shown on hover).
    """
    start = rows["start_us"].to_numpy(dtype=np.float64) - extent[0]
    end = rows["end_us"].to_numpy(dtype=np.float64) - extent[0]
    table = pd.DataFrame({"y": rows["y"].to_numpy(dtype=np.float64), "start": start, "end": end})
    table["group"] = -1
    for _, lane in table.groupby("y"):
        lane_start, lane_end = lane["start"].to_numpy(dtype=np.float64), lane["end"].to_numpy(dtype=np.float64)
        table.loc[lane.index, "group"] = thin(lane_start, lane_end, extent[1])
    table["place"] = np.arange(len(table))
    merged = table.groupby(["y", "group"], sort=False).agg(
        start=("start", "min"), end=("end", "max"), count=("place", "size"), place=("place", "first")
    )
    describe = _describe_span if what == "unit" else _describe_collective
    texts = [
        describe(rows.iloc[place]) if count == 1 else f"<b>{count} merged</b>: zoomed out too far to tell them apart"
        for place, count in zip(merged["place"], merged["count"], strict=True)
    ]
    places = zip(merged["place"], merged["count"], strict=True)
    names = [str(rows[what].iloc[place]) if count == 1 else "" for place, count in places]
    length = (merged["end"] - merged["start"]) / 1e3
    return merged.assign(start=merged["start"] / 1e3, length=length, text=texts, name=names).reset_index()


def bars(merged: pd.DataFrame, name: str, colour: str, width: float) -> go.Bar:
    """All bars of one kind as one trace."""
    return go.Bar(
        base=merged["start"].to_numpy(),
        x=merged["length"].to_numpy(),
        y=merged["y"].to_numpy(),
        width=width,
        orientation="h",
        name=name,
        marker={"color": colour, "line": GAP},
        text=merged["name"].tolist() if len(merged) <= MAX_NAMED else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=merged["text"].tolist(),
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _describe_span(row: "pd.Series[str]") -> str:
    return f"<b>{row['unit'] or 'model'}</b>: {row['kind']}, rank {row['rank']}<br>{_length(row, 'start_us', 'end_us')}"


def _describe_collective(row: "pd.Series[str]") -> str:
    speed = float(row["bus_gb_per_s"])
    waited = pd.notna(row["wait_start_us"]) and pd.notna(row["wait_end_us"])
    lines = [
        f"<b>{row['op']}</b>: {row['tag']}, rank {row['rank']} of {row['group_size']} on {row['axis']}",
        f"{format_bytes(float(row['bytes']))} {row['dtype']}, sends {format_bytes(float(row['wire_bytes']))}",
        f"took {_length(row, 'start_us', 'end_us')}" + ("" if np.isnan(speed) else f", bus {speed:.3g} GB/s"),
        f"queued {_length(row, 'issue_us', 'start_us')}",
        f"the rank waited {_length(row, 'wait_start_us', 'wait_end_us')}" if waited else "the rank never waited for it",
        f"transport {row['transport']}, issued in {row['phase']}",
    ]
    return "<br>".join(lines)


def _length(row: "pd.Series[str]", start: str, end: str) -> str:
    return format_us(float(row[end]) - float(row[start]))
