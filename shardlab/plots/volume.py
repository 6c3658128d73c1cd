"""Bytes on the wire: what each run sends per rank and step, by collective."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import wire_bytes
from shardlab.analysis.rows import labelled
from shardlab.plots.colours import COLLECTIVE_COLOURS
from shardlab.plots.labels import averaged, listing, subtitle
from shardlab.plots.stack import stacked_bars
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import format_bytes
from shardlab.tables import COLLECTIVES

TITLE = "Bytes on the wire per rank and step"


def wire_volume(collectives: pd.DataFrame, runs: Sequence[str] | None = None) -> go.Figure:
    """Bytes a rank sends in a step, stacked by collective, one bar per run: the mean over ranks and steps.

    Collectives before the first step (step -1) are left out.

    Args:
        collectives: table ``collectives``.
        runs: names in drawing order; a run without any collective (a single process leaves none) gets an empty bar.
            None for the runs of the table.
    """
    COLLECTIVES.check(collectives)
    rows = labelled(collectives[collectives["step"] >= 0])
    sent = _per_rank_and_step(rows)
    order = [*dict.fromkeys([*(runs or []), *sent["label"]])]
    if not order:
        return nothing(TITLE, "no communication recorded")
    silent = pd.DataFrame({"label": order, "op": "", "bytes": 0.0})
    bars = pd.concat([silent, sent], ignore_index=True) if len(sent) else silent
    words = (averaged(rows, "mean"), "by the ring formula")
    figure = new_figure(TITLE, subtitle(rows, ", ".join(part for part in words if part)))
    stacked_bars(figure, bars, "op", {str(op): colour for op, colour in COLLECTIVE_COLOURS.items()}, "bytes sent")
    return finish(figure, _summary(bars))


def _per_rank_and_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns label, op, bytes: the sum over a run divided by its number of (rank, step) pairs."""
    if rows.empty:
        return pd.DataFrame({"label": [], "op": [], "bytes": []})
    sums = labelled(wire_bytes(rows.drop(columns="label")))
    pairs = rows.groupby("label", sort=False)[["rank", "step"]].apply(lambda pair: len(pair.drop_duplicates()))
    sent = sums.groupby(["label", "op"])["wire_bytes"].sum().reset_index(name="bytes")
    return sent.assign(bytes=sent["bytes"] / sent["label"].map(pairs)).sort_values(
        "label", key=lambda label: label.map({name: place for place, name in enumerate(pairs.index)}), kind="stable"
    )


def _summary(bars: pd.DataFrame) -> str:
    totals = bars.groupby("label", sort=False)["bytes"].sum()
    parts = [f"{label} {format_bytes(value)}" for label, value in totals.items()]
    return f"{TITLE}: {listing(parts)}."
