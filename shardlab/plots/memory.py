"""Live bytes by role: what each run holds, at rest after a step or at the peak of one."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import at_rest, peak
from shardlab.analysis.rows import labelled, labels_of
from shardlab.plots.colours import ROLE_COLOURS
from shardlab.plots.labels import listing, subtitle
from shardlab.plots.stack import stacked_bars
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import format_bytes
from shardlab.tables import MEMORY
from shardlab.vocabulary import Role

TITLES = {"rest": "Memory at rest after a step", "peak": "Memory at the peak of a step"}
NOTES = {"rest": "each role on the rank that holds most of it", "peak": "the one moment with most live bytes"}


def memory_by_role(memory: pd.DataFrame, where: str = "rest", rank: int | None = None) -> go.Figure:
    """Bytes of each role as stacked bars, one bar per run.

    Args:
        memory: table ``memory``.
        where: 'rest' (after the last step) or 'peak' (the highest moment).
        rank: one rank; None for the maximum over ranks.

    Raises:
        ValueError: ``where`` is neither, or the table has no such rank.
    """
    MEMORY.check(memory)
    if where not in TITLES:
        raise ValueError(f"where: {where!r} is neither 'rest' nor 'peak'")
    if rank is not None and rank not in set(memory["rank"]):
        raise ValueError(f"rank: {rank} is none of {sorted(set(memory['rank']))}")
    rows = memory if rank is None else memory[memory["rank"] == rank]
    held = labelled((at_rest if where == "rest" else peak)(rows))
    if held.empty:
        return nothing(TITLES[where], "memory was not traced")
    held = held.assign(bytes=held["bytes"].astype("float64"))
    figure = new_figure(TITLES[where], subtitle(held, NOTES[where] if rank is None else f"rank {rank}"))
    stacked_bars(figure, held, "role", {str(role): colour for role, colour in ROLE_COLOURS.items()}, "live bytes")
    places = _places(held) if where == "peak" else {}
    if places:  # under the name of the run: in which module, and in which phase
        words = [f"{label}<br><span style='font-size:12px'>{places.get(label, '')}</span>" for label in labels_of(held)]
        figure.update_yaxes(tickvals=labels_of(held), ticktext=words)
    return finish(figure, _summary(held, where, places))


def _places(held: pd.DataFrame) -> dict[str, str]:
    """Where each run's peak was, such as 'blocks.3, backward'; runs whose record does not tell are left out."""
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
