"""Overlap as a bar: how much of each run's communication compute hides, and how much stays exposed."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.rows import labelled, labels_of
from shardlab.plots.colours import EXPOSED, HIDDEN
from shardlab.plots.labels import averaged, listing, subtitle
from shardlab.plots.stack import GAP, end_with
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import format_percent, format_us

TITLE = "Communication: exposed and hidden behind compute"
COLUMNS = ("run", "source", "rank", "step", "comm_us", "both_us", "overlap", "exposed_us")


def overlap_bars(overlap_table: pd.DataFrame) -> go.Figure:
    """Exposed and hidden communication of each run, with the overlap in percent at the end.

    Each is a median over ranks and steps (steps before the first, -1, are left out), so the two need not add up exactly
    to the median of the whole.

    Args:
        overlap_table: what ``analysis.overlap`` returns.

    Raises:
        ValueError: columns are missing.
    """
    missing = [name for name in COLUMNS if name not in overlap_table.columns]
    if missing:
        raise ValueError(f"overlap table: missing columns {missing}; it comes from shardlab.analysis.overlap")
    rows = labelled(overlap_table[overlap_table["step"] >= 0])
    if rows.empty:
        return nothing(TITLE, "no steps recorded")
    medians = rows.groupby("label", sort=False)[["exposed_us", "both_us", "overlap"]].median()
    figure = new_figure(TITLE, subtitle(rows, f"{averaged(rows, 'median')}; overlap at the end of the bar"))
    _bar(figure, "exposed", EXPOSED, medians["exposed_us"])
    _bar(figure, "hidden behind compute", HIDDEN, medians["both_us"])
    words = [_words(share) for share in medians["overlap"]]
    ends_ms = (medians["exposed_us"] + medians["both_us"]) / 1e3
    end_with(figure, ends_ms, words, labels_of(rows), "time per rank and step (ms)")
    return finish(figure, _summary(medians))


def _bar(figure: go.Figure, name: str, colour: str, times_us: pd.Series) -> None:
    figure.add_bar(
        x=(times_us / 1e3).where(times_us > 0).to_numpy(),
        y=list(times_us.index),
        orientation="h",
        name=name,
        marker={"color": colour, "line": GAP},
        customdata=[[format_us(value)] for value in times_us],
        hovertemplate=f"<b>%{{y}}</b><br>{name}: %{{customdata[0]}}<extra></extra>",
    )


def _words(share: float) -> str:
    return "no communication" if np.isnan(share) else f"{format_percent(share)} hidden"


def _summary(medians: pd.DataFrame) -> str:
    parts = [
        f"{label} no communication"
        if np.isnan(row["overlap"])
        else f"{label} {format_percent(row['overlap'])} hidden with {format_us(row['exposed_us'])} exposed"
        for label, row in medians.iterrows()
    ]
    return f"Communication per rank and step (medians): {listing(parts)}."
