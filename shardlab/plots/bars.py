"""Horizontal stacked bars: one bar per run, one colour per part, a text at the end of each bar."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.plots.text import byte_scale, format_bytes

GAP = {"color": "rgba(255,255,255,0.45)", "width": 1}
NARROW = 0.004  # of the figure's width: narrower bars would be all outline, which is bright on a dark background
SEEN = 0.001  # of the longest bar: a part smaller than this in every bar gets no legend entry
END_TEXT_PX = 96  # room for the text behind the longest bar


def gaps(lengths: NDArray[np.float64], whole: float) -> dict[str, Any]:
    """Outlines that separate neighbouring bars; bars too narrow for an outline get none."""
    return {"color": GAP["color"], "width": np.where(lengths >= NARROW * whole, 1.0, 0.0)}


def shares_of(sizes: pd.Series, wholes: pd.Series) -> list[str]:
    """Each size as a percentage of its whole; empty where that is 0."""
    return [f"{size / whole:.0%}" if whole else "" for size, whole in zip(sizes, wholes, strict=True)]


def stacked_bars(figure: go.Figure, rows: pd.DataFrame, part: str, colours: Mapping[str, str], quantity: str) -> None:
    """Draw ``rows`` (columns ``label``, the column named ``part``, ``bytes``) into ``figure``.

    Parts are stacked in the order of ``colours``; ``quantity`` names the axis, which gets its unit in brackets.
    """
    rows = rows.assign(bytes=rows["bytes"].astype("float64"))
    totals = rows.groupby("label", sort=False)["bytes"].sum()
    divisor, unit = byte_scale(float(totals.max()))
    hover = "%{customdata[0]} (%{customdata[1]} B)<br>%{customdata[2]} of the bar"
    for name, colour in colours.items():
        sizes = rows[rows[part] == name].set_index("label")["bytes"].reindex(totals.index).fillna(0.0)
        if (sizes > 0).any():
            texts = zip(map(format_bytes, sizes), map("{:,.0f}".format, sizes), shares_of(sizes, totals), strict=True)
            add_part(figure, name.replace("_", " "), colour, sizes / divisor, texts, hover)
            figure.data[-1].showlegend = bool(sizes.max() >= SEEN * totals.max())
    end_with(figure, totals / divisor, [format_bytes(value) for value in totals], f"{quantity} ({unit})")


def add_part(
    figure: go.Figure, name: str, colour: str, lengths: pd.Series, texts: Iterable[tuple[str, ...]], hover: str
) -> None:
    """Draw one part of every bar.

    Args:
        figure: gets a trace.
        name: of the part.
        colour: of the part.
        lengths: by label of the bar.
        texts: of each bar.
        hover: what it says of them.
    """
    figure.add_bar(
        x=lengths.where(lengths > 0).to_numpy(),  # a bar of length 0 would still draw its outline
        y=list(lengths.index),
        orientation="h",
        name=name,
        marker={"color": colour, "line": GAP},
        customdata=[list(words) for words in texts],
        hovertemplate=f"<b>%{{y}}</b><br>{name}: {hover}<extra></extra>",
    )


def end_with(figure: go.Figure, ends: pd.Series, words: Sequence[str], quantity: str) -> None:
    """Write a text behind each bar and lay the figure out.

    Args:
        figure: holds a horizontal bar trace for each part.
        ends: where each bar ends, by label, from the top.
        words: the text behind each bar.
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
    figure.update_yaxes(categoryorder="array", categoryarray=list(ends.index), autorange="reversed", showgrid=False)
