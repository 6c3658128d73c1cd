"""Live bytes by role, of each run at rest or at its peak, of each rank at a moment; and what processes hold in all."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import at_rest, peak, process_items
from shardlab.analysis.rows import labelled, labels_of, require_columns
from shardlab.plots.bars import stacked_bars
from shardlab.plots.colours import INK, PART_COLOURS, ROLE_COLOURS
from shardlab.plots.text import SOURCE_NOTES, byte_listing, byte_scale, format_bytes, joined, listing, subtitle
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.tables import MEMORY
from shardlab.vocabulary import Role

TITLES = {"rest": "Memory at rest after a step", "peak": "Memory at the peak of a step"}
NOTES = {"rest": "each role on the rank that holds most of it", "peak": "the one moment with most live bytes"}
BY_RANK = "Held by each rank"
PROCESS = "Held by the process of one rank"
ON_GPU = "What a rank needs at least, against the memory of its GPU"
ON_GPU_COLUMNS = {
    "parameter_bytes": Role.PARAMETER, "gathered_bytes": Role.GATHERED_PARAMETER, "gradient_bytes": Role.GRADIENT,
    "optimizer_bytes": Role.OPTIMIZER_STATE, "row_bytes": Role.ACTIVATION,
}  # fmt: skip


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
    figure = new_figure(TITLES[where], subtitle(held, NOTES[where] if rank is None else f"rank {rank}"))
    stacked_bars(figure, held, "role", ROLE_COLOURS, "live bytes")
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
    state = held[held["role"] == Role.OPTIMIZER_STATE].set_index("label")["bytes"]
    tail = f" Of this, optimizer state: {byte_listing(state)}." if len(state) else ""
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
    roles = [role for role in ROLE_COLOURS if role in ranks.columns]
    if "rank" not in ranks.columns or not roles:
        raise ValueError(f"ranks: missing columns; needs rank and at least one of {', '.join(ROLE_COLOURS)}")
    known = ranks.dropna(subset=roles)
    if known.empty:
        return nothing(BY_RANK, "memory was not recorded")
    rows = known.melt(id_vars="rank", value_vars=roles, var_name="role", value_name="bytes")
    rows = rows.assign(label="rank " + rows["rank"].astype(str)).sort_values("rank", kind="stable")
    figure = new_figure(BY_RANK, moment)
    stacked_bars(figure, rows, "role", ROLE_COLOURS, "live bytes")
    totals = rows.groupby("label", sort=False)["bytes"].sum()
    if most_bytes is not None:
        figure.update_xaxes(range=[0, 1.02 * most_bytes / byte_scale(float(totals.max()))[0]])
    figure.update_layout(height=max(300, 190 + 40 * len(totals)))
    return finish(figure, f"{BY_RANK}{f' ({moment})' if moment else ''}: {byte_listing(totals)}.")


def memory_on_gpu(plans: pd.DataFrame, memory_bytes: float, rows: int = 1) -> go.Figure:
    """Model states, what is gathered at once and the activations of some rows as stacked bars; a line is the memory.

    Args:
        plans: one row per strategy: ``strategy``, ``parameter_bytes``, ``gathered_bytes``, ``gradient_bytes``,
            ``optimizer_bytes`` and ``row_bytes``.
        memory_bytes: of the GPU.
        rows: of a micro-batch.

    Raises:
        ValueError: a column or a number is missing, or a number is not above zero.
    """
    require_columns(plans, ("strategy", *ON_GPU_COLUMNS), "plans")
    if (unknown := plans["row_bytes"].isna()).any():
        names = ", ".join(plans.loc[unknown, "strategy"])
        raise ValueError(f"plans: what a row takes is not known of {names}, so the memory of rows cannot be drawn")
    if memory_bytes <= 0 or rows < 1:
        raise ValueError(f"memory_bytes, rows: {memory_bytes:g} and {rows} were given; both must be above 0")
    held = plans.assign(row_bytes=rows * plans["row_bytes"]).rename(columns=ON_GPU_COLUMNS)
    roles = list(ON_GPU_COLUMNS.values())
    bars = held.melt("strategy", roles, var_name="role", value_name="bytes").rename(columns={"strategy": "label"})
    words = f"activations of {rows} row{'' if rows == 1 else 's'}; dashed: {format_bytes(memory_bytes)}"
    figure = new_figure(ON_GPU, joined(SOURCE_NOTES["predicted"], words))
    stacked_bars(figure, bars, "role", {role: ROLE_COLOURS[role] for role in roles}, "bytes")
    totals = bars.groupby("label", sort=False)["bytes"].sum()
    divisor, _ = byte_scale(float(totals.max()))
    figure.add_vline(x=memory_bytes / divisor, line={"color": INK, "width": 2, "dash": "dash"})
    figure.update_xaxes(range=[0, 1.04 * max(float(totals.max()), memory_bytes) / divisor])
    fit = [str(label) for label in totals.index[totals <= memory_bytes]]
    return finish(
        figure, f"{ON_GPU}, {format_bytes(memory_bytes)}: {byte_listing(totals)}. It suffices for {listing(fit)}."
    )


def held_by_process(memory: pd.DataFrame) -> go.Figure:
    """All that the process of a rank holds of the host's memory, as stacked bars that end at its resident set.

    Tensors by role come first, then what torch does not own: the heap, what malloc keeps, the interpreter, libraries
    and memory that ranks share.

    Args:
        memory: table ``memory``.

    Raises:
        ValueError: a column is missing.
    """
    held = labelled(process_items(memory))
    if held.empty:
        return nothing(PROCESS, "only recorded on a CPU, on Linux with GNU's malloc")
    figure = new_figure(PROCESS, subtitle(held, "on the rank that holds most; tensors, then what torch does not own"))
    stacked_bars(figure, held, "item", ROLE_COLOURS | PART_COLOURS, "bytes")
    return finish(figure, _process_summary(held))


def _process_summary(held: pd.DataFrame) -> str:
    tensors = held[held["item"].isin([str(role) for role in Role])].groupby("label")["bytes"].sum()
    parts = [
        f"{label} {format_bytes(whole)}, {format_bytes(tensors.get(label, 0.0))} of it in tensors"
        for label, whole in held.groupby("label", sort=False)["bytes"].sum().items()
    ]
    return f"{PROCESS}: {'; '.join(parts)}."
