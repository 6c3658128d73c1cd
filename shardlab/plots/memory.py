"""Live bytes by role: for each run at rest or at its peak, and for each rank at one moment."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import at_rest, peak
from shardlab.analysis.rows import labelled, labels_of
from shardlab.plots.bars import stacked_bars
from shardlab.plots.colours import ROLE_COLOURS
from shardlab.plots.text import byte_scale, format_bytes, listing, subtitle
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.tables import MEMORY
from shardlab.vocabulary import Role

TITLES = {"rest": "Memory at rest after a step", "peak": "Memory at the peak of a step"}
NOTES = {"rest": "each role on the rank that holds most of it", "peak": "the one moment with most live bytes"}
BY_RANK = "Held by each rank"


def memory_by_role(memory: pd.DataFrame, where: str = "rest", rank: int | None = None) -> go.Figure:
    """Bytes of each role as stacked bars, one bar per run.

    Args:
        memory: table ``memory``.
        where: 'rest' (after the last step) or 'peak' (the highest moment).
        rank: one rank; None for the maximum over ranks.

    Raises:
        ValueError: ``where`` is something else, or the table has no such rank.
    """
    MEMORY.check(memory)
    if where not in TITLES:
        raise ValueError(f"where: {where!r} is not one of rest, peak")
    if rank is not None and rank not in set(memory["rank"]):
        raise ValueError(f"rank: {rank} is not one of {', '.join(map(str, sorted(set(memory['rank']))))}")
    rows = memory if rank is None else memory[memory["rank"] == rank]
    held = labelled((at_rest if where == "rest" else peak)(rows))
    if held.empty:
        return nothing(TITLES[where], "memory was not traced")
    held = held.assign(bytes=held["bytes"].astype("float64"))
    figure = new_figure(TITLES[where], subtitle(held, NOTES[where] if rank is None else f"rank {rank}"))
    stacked_bars(figure, held, "role", {str(role): colour for role, colour in ROLE_COLOURS.items()}, "live bytes")
    places = _places(held) if where == "peak" else {}
    if places:  # below the name of the run: the unit and the phase of the peak
        words = [f"{label}<br><span style='font-size:12px'>{places.get(label, '')}</span>" for label in labels_of(held)]
        figure.update_yaxes(tickvals=labels_of(held), ticktext=words)
    return finish(figure, _summary(held, where, places))


def _places(held: pd.DataFrame) -> dict[str, str]:
    """Unit and phase of each run's peak, such as 'blocks.3, backward'; runs that were not traced are left out."""
    moments = held.drop_duplicates("label").set_index("label")[["unit", "phase"]].dropna()
    return {str(label): f"{row['unit']}, {row['phase']}" for label, row in moments.iterrows()}


def _summary(held: pd.DataFrame, where: str, places: dict[str, str]) -> str:
    totals = held.groupby("label", sort=False)["bytes"].sum()
    parts = [
        f"{label} {format_bytes(value)}" + (f" (in {places[str(label)]})" if label in places else "")
        for label, value in totals.items()
    ]
    shares = held[held["role"] == str(Role.OPTIMIZER_STATE)].set_index("label")["bytes"]
    state = [f"{label} {format_bytes(value)}" for label, value in shares.items()]
    tail = f" Of this, optimizer state: {listing(state)}." if state else ""
    return f"{TITLES[where]} per rank: {listing(parts)}.{tail}"


def held_by_rank(ranks: pd.DataFrame, *, most_bytes: float | None = None, moment: str = "") -> go.Figure:
    """Live bytes of each rank as stacked bars.

    Args:
        ranks: one row per rank: ``rank``, and a column of bytes for each role (``vocabulary.Role``); NA if unknown.
        most_bytes: the end of the axis, so that consecutive figures share it; None fits it to the data.
        moment: the time, for the subtitle.

    Raises:
        ValueError: the column ``rank`` is missing, or every role.
    """
    roles = [str(role) for role in ROLE_COLOURS if str(role) in ranks.columns]
    if "rank" not in ranks.columns or not roles:
        raise ValueError(f"ranks: missing columns; needs rank and at least one of {', '.join(map(str, ROLE_COLOURS))}")
    known = ranks.dropna(subset=roles)
    if known.empty:
        return nothing(BY_RANK, "memory was not recorded")
    rows = known.melt(id_vars="rank", value_vars=roles, var_name="role", value_name="bytes")
    rows = rows.assign(label="rank " + rows["rank"].astype(str), bytes=rows["bytes"].astype("float64"))
    rows = rows.sort_values("rank", kind="stable")
    figure = new_figure(BY_RANK, moment)
    stacked_bars(figure, rows, "role", {str(role): colour for role, colour in ROLE_COLOURS.items()}, "live bytes")
    totals = rows.groupby("label", sort=False)["bytes"].sum()
    if most_bytes is not None:
        divisor, _ = byte_scale(float(totals.max()))
        figure.update_xaxes(range=[0, 1.02 * most_bytes / divisor])
    figure.update_layout(height=max(300, 190 + 40 * len(totals)))
    words = listing([f"{label} {format_bytes(value)}" for label, value in totals.items()])
    return finish(figure, f"{BY_RANK}{f' ({moment})' if moment else ''}: {words}.")
