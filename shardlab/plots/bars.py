"""Horizontal stacked bars: one bar per run, one colour per part, a text at the end of each bar."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.analysis.rows import labels_of
from shardlab.plots.text import byte_scale, format_bytes

GAP = {"color": "rgba(255,255,255,0.45)", "width": 1}
NARROW = 0.004  # of the figure's width: narrower bars would be all outline, which is bright on a dark background
SEEN = 0.001  # of the longest bar: a part smaller than this in every bar gets no legend entry
END_TEXT_PX = 96  # room for the text behind the longest bar


def gaps(lengths: NDArray[np.float64], whole: float) -> dict[str, Any]:
    """Outlines that separate neighbouring bars; bars too narrow for an outline get none."""
    return {"color": GAP["color"], "width": np.where(lengths >= NARROW * whole, 1.0, 0.0)}


def stacked_bars(figure: go.Figure, rows: pd.DataFrame, part: str, colours: dict[str, str], quantity: str) -> None:
    """Draw ``rows`` (columns ``label``, the column named ``part``, ``bytes``) into ``figure``.

    Parts are stacked in the order of ``colours``; ``quantity`` names the axis, which gets its unit in brackets.
    """
    totals = rows.groupby("label", sort=False)["bytes"].sum()
    divisor, unit = byte_scale(float(totals.max()))
    for name, colour in colours.items():
        sizes = rows[rows[part] == name].set_index("label")["bytes"].reindex(totals.index).fillna(0.0)
        if (sizes > 0).any():
            is_seen = float(sizes.max()) >= SEEN * float(totals.max())
            figure.add_trace(_part(name, colour, sizes, totals, divisor).update(showlegend=is_seen))
    words = [format_bytes(value) for value in totals]
    end_with(figure, totals / divisor, words, labels_of(rows), f"{quantity} ({unit})")


def end_with(figure: go.Figure, ends: pd.Series, words: Sequence[str], labels: Sequence[str], quantity: str) -> None:
    """Write a text behind each bar and lay the figure out.

    Args:
        figure: holds a horizontal bar trace for each part.
        ends: where each bar ends, by label.
        words: the text behind each bar.
        labels: labels of all bars, from the top.
        quantity: title of the axis, with its unit.
    """
    figure.add_scatter(
        x=ends.to_numpy(),
        y=list(ends.index),
        mode="text",
        text=[f" {word}" for word in words],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        name="end",
    )
    figure.update_layout(barmode="stack", height=max(340, 210 + 54 * len(ends)), legend_traceorder="normal")
    figure.update_layout(margin_r=END_TEXT_PX)
    figure.update_xaxes(title_text=quantity, range=[0, 1.02 * float(ends.max()) or 1.0])
    figure.update_yaxes(categoryorder="array", categoryarray=list(labels), autorange="reversed", showgrid=False)


def _part(name: str, colour: str, sizes: pd.Series, totals: pd.Series, divisor: float) -> go.Bar:
    words = name.replace("_", " ")
    shares = [f"{size / total:.0%}" if total else "" for size, total in zip(sizes, totals, strict=True)]
    return go.Bar(
        x=(sizes / divisor).where(sizes > 0).to_numpy(),  # a bar of length 0 would still draw its outline
        y=list(totals.index),
        orientation="h",
        name=words,
        marker={"color": colour, "line": GAP},
        customdata=[[format_bytes(size), f"{size:,.0f}", share] for size, share in zip(sizes, shares, strict=True)],
        hovertemplate=f"<b>%{{y}}</b><br>{words}: %{{customdata[0]}} (%{{customdata[1]}} B)"
        "<br>%{customdata[2]} of the bar<extra></extra>",
    )
