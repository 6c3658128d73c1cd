"""What every rank holds at one moment, by role: a bar per rank."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.colours import ROLE_COLOURS
from shardlab.plots.labels import listing
from shardlab.plots.stack import stacked_bars
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import byte_scale, format_bytes

TITLE = "Held by each rank"


def held_by_rank(ranks: pd.DataFrame, *, most_bytes: float | None = None, moment: str = "") -> go.Figure:
    """Live bytes of each rank as stacked bars.

    Args:
        ranks: one row per rank: ``rank``, and a column of bytes for each role (``vocabulary.Role``); NA where they are
            not known.
        most_bytes: the end of the axis, the same for pictures that follow each other; None for what is needed.
        moment: when, for the subtitle.

    Raises:
        ValueError: there is no column ``rank``, or none of a role.
    """
    roles = [str(role) for role in ROLE_COLOURS if str(role) in ranks.columns]
    if "rank" not in ranks.columns or not roles:
        raise ValueError(f"ranks: needs the column rank and some of {', '.join(map(str, ROLE_COLOURS))}")
    known = ranks.dropna(subset=roles)
    if known.empty:
        return nothing(TITLE, "memory was not recorded")
    rows = known.melt(id_vars="rank", value_vars=roles, var_name="role", value_name="bytes")
    rows = rows.assign(label="rank " + rows["rank"].astype(str), bytes=rows["bytes"].astype("float64"))
    rows = rows.sort_values("rank", kind="stable")
    figure = new_figure(TITLE, moment)
    stacked_bars(figure, rows, "role", {str(role): colour for role, colour in ROLE_COLOURS.items()}, "live bytes")
    totals = rows.groupby("label", sort=False)["bytes"].sum()
    if most_bytes is not None:
        divisor, _ = byte_scale(float(totals.max()))
        figure.update_xaxes(range=[0, 1.02 * most_bytes / divisor])
    figure.update_layout(height=max(300, 190 + 40 * len(totals)))
    words = listing([f"{label} {format_bytes(value)}" for label, value in totals.items()])
    return finish(figure, f"{TITLE}{f' ({moment})' if moment else ''}: {words}.")
