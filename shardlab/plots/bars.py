"""Horizontal stacked bars: one bar per run, one colour per part, a text at the end of each bar.

And what they show of memory: live bytes by role, of each run at rest or at its peak; and what processes hold in all.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.analysis import peak, process_items
from shardlab.analysis.held_bytes import on_fullest_rank
from shardlab.analysis.rows import labelled, labels_of, require_columns
from shardlab.plots import text
from shardlab.plots.text import byte_listing, byte_scale, format_bytes, format_count, joined, listing, subtitle
from shardlab.plots.theme import INK, PART_COLOURS, PATTERNS, ROLE_COLOURS, finish, new_figure, nothing
from shardlab.records.tables import MEMORY
from shardlab.vocabulary import Role

GAP = {"color": "rgba(255,255,255,0.45)", "width": 1}
NARROW = 0.004  # of the figure's width: narrower bars would be all outline, which is bright on a dark background
SEEN = 0.001  # of the longest bar: a part smaller than this in every bar gets no legend entry
NEAR = 0.2  # of the longest bar: a tick there would strike through the words behind a bar
FAR = 8  # times the longest bar: a line there would leave no bar to see
END_TEXT_PX = 96  # room for the text behind the longest bar, at least
WIDEST_LETTER_PX = 10
TITLES = {"rest": "Memory at rest after a step", "peak": "Memory at the peak of a step"}
NOTES = {"rest": "on the rank that holds most", "peak": "the one moment with most live bytes"}
PROCESS = "Held by the process of one rank"
ON_GPU = "What a rank needs at least"
ON_GPU_COLUMNS = {
    "parameter_bytes": Role.PARAMETER, "optimizer_bytes": Role.OPTIMIZER_STATE, "gradient_bytes": Role.GRADIENT,
    "gathered_bytes": Role.GATHERED_PARAMETER, "row_bytes": Role.ACTIVATION,
}  # fmt: skip


def gaps(lengths: NDArray[np.float64], whole: float) -> dict[str, Any]:
    """Outlines that separate neighbouring bars; bars too narrow for an outline get none."""
    return {"color": GAP["color"], "width": np.where(lengths >= NARROW * whole, 1.0, 0.0)}


def shares_of(sizes: pd.Series, wholes: pd.Series) -> list[str]:
    """Each size as a percentage of its whole; empty where that is 0."""
    return [f"{size / whole:.0%}" if whole else "" for size, whole in zip(sizes, wholes, strict=True)]


def stacked_bars(
    figure: go.Figure, rows: pd.DataFrame, part: str, colours: Mapping[str, str], quantity: str
) -> "pd.Series[float]":
    """Draw ``rows`` (columns ``label``, the column named ``part``, ``bytes``) into ``figure``; the bytes of each label.

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
    return totals


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
        y=list(lengths.index), orientation="h", name=name, customdata=[list(words) for words in texts],
        marker={"color": colour, "line": GAP, "pattern": PATTERNS.get(colour)},
        hovertemplate=f"<b>%{{y}}</b><br>{name}: {hover}<extra></extra>",
    )  # fmt: skip


def end_with(figure: go.Figure, ends: pd.Series, words: Sequence[str], quantity: str) -> None:
    """Write a text behind each bar and lay the figure out.

    Args:
        figure: holds a horizontal bar trace for each part.
        ends: where each bar ends, by label, from the top.
        words: the text behind each bar.
        quantity: title of the axis, with its unit.
    """
    figure.add_scatter(
        x=ends.to_numpy(), y=list(ends.index), mode="text", text=[f" {word}" for word in words],
        textposition="middle right", cliponaxis=False, hoverinfo="skip", showlegend=False, name="end",
    )  # fmt: skip
    figure.update_layout(barmode="stack", height=max(340, 210 + 54 * len(ends)), legend_traceorder="normal")
    figure.update_layout(margin_r=max(END_TEXT_PX, WIDEST_LETTER_PX * max(map(len, words), default=0)))
    figure.update_xaxes(title_text=quantity, range=[0, 1.02 * float(ends.max()) or 1.0])
    figure.update_yaxes(categoryorder="array", categoryarray=list(ends.index), autorange="reversed", showgrid=False)


def memory_by_role(memory: pd.DataFrame, where: str = "rest", *, with_peak: bool = False) -> go.Figure:
    """Bytes of each role as stacked bars, one bar per run: on the rank of the table that holds the most.

    At rest without unattributed tensors, which no plan and no sum of a strategy counts; ``held_by_process`` shows them.

    Args:
        memory: table ``memory``.
        where: 'rest' (after the last step) or 'peak' (the highest moment).
        with_peak: a tick at the peak of each run, where one was traced.

    Raises:
        ValueError: ``where`` is something else.
    """
    MEMORY.check(memory)
    if where not in TITLES:
        raise ValueError(f"where: {where!r} is not one of rest, peak")
    is_named = memory["role"] != str(Role.UNATTRIBUTED)
    held = labelled(on_fullest_rank(memory[is_named]) if where == "rest" else peak(memory))
    if held.empty:
        return nothing(TITLES[where], "memory was not traced")
    figure = new_figure(TITLES[where], subtitle(held, NOTES[where]))
    totals = stacked_bars(figure, held, "role", ROLE_COLOURS, "live bytes")
    if with_peak:
        _tick_peaks(figure, labelled(peak(memory)), byte_scale(float(totals.max()))[0])
    places = {}
    if where == "peak":  # below the name of the run: the unit and the phase of its peak, if it was traced
        moments = held.drop_duplicates("label").set_index("label")[["unit", "phase"]].dropna()
        places = {str(label): f"{row['unit']}, {row['phase']}" for label, row in moments.iterrows()}
    if places:
        named = {label: escape(text.shortened(places.get(label, ""))) for label in labels_of(held)}
        words = [f"{label}<br><span style='font-size:12px'>{place}</span>" for label, place in named.items()]
        figure.update_yaxes(tickvals=list(named), ticktext=words)
    return finish(figure, _summary(held, totals, where, places))


def _tick_peaks(figure: go.Figure, moments: pd.DataFrame, divisor: float) -> None:
    """A tick at the highest moment of each run, in the unit of the axis, which grows to hold it."""
    peaks = moments.groupby("label", sort=False)["bytes"].sum().astype("float64")
    if not len(peaks):
        return
    # Texts lie to the left of their ticks: at the right end is the toolbar.
    figure.add_scatter(
        x=peaks / divisor, y=list(peaks.index), mode="markers+text", name="peak of a step", cliponaxis=False,
        text=[format_bytes(size) for size in peaks], textposition="top left", textfont={"size": 12},
        marker={"symbol": "line-ns", "size": 22, "line": {"color": INK, "width": 3}},
        customdata=[[format_bytes(size)] for size in peaks],
        hovertemplate="<b>%{y}</b><br>peak of a step: %{customdata[0]}<extra></extra>",
    )  # fmt: skip
    end, longest = next(trace for trace in figure.data if trace.name == "end"), float(peaks.max()) / divisor
    above = peaks.reindex(end.y).to_numpy(dtype=np.float64) / divisor  # the words of a bar stand behind a tick near it
    end.x = np.where((above > end.x) & (above < end.x + NEAR * longest), above, end.x)
    figure.update_xaxes(range=[0, max(figure.layout.xaxis.range[1], 1.04 * float(peaks.max()) / divisor)])


def _summary(held: pd.DataFrame, totals: "pd.Series[float]", where: str, places: dict[str, str]) -> str:
    parts = [
        f"{label} {format_bytes(value)}" + (f" (in {places[str(label)]})" if label in places else "")
        for label, value in totals.items()
    ]
    state = held[held["role"] == Role.OPTIMIZER_STATE].set_index("label")["bytes"]
    tail = f" Of this, optimizer state: {byte_listing(state)}." if len(state) else ""
    return f"{TITLES[where]} per rank: {listing(parts)}.{tail}"


def memory_on_gpu(plans: pd.DataFrame, memory_bytes: float | None, rows: int = 1) -> go.Figure:
    """Model states, what is gathered at once and the activations of some rows as stacked bars; a line is the memory.

    Args:
        plans: one row per strategy: ``strategy``, ``parameter_bytes``, ``gradient_bytes``, ``optimizer_bytes``, and
            ``gathered_bytes``, ``row_bytes`` and ``rows_that_fit`` where they are known.
        memory_bytes: of the GPU; None draws no line, nor does what is far beyond the bars.
        rows: of a micro-batch.

    Raises:
        ValueError: a column is missing, or a number is not above zero.
    """
    require_columns(plans, ("strategy", "parameter_bytes", "gradient_bytes", "optimizer_bytes"), "plans")
    if rows < 1 or (memory_bytes is not None and memory_bytes <= 0):
        raise ValueError(f"memory_bytes, rows: {memory_bytes} and {rows} were given; both must be above 0")
    held = plans.reindex(columns=["strategy", *ON_GPU_COLUMNS]).rename(columns=ON_GPU_COLUMNS)
    held[Role.OTHER] = _others_at_rest(plans)
    unknown = [str(name) for name in held.loc[held[Role.ACTIVATION].isna(), "strategy"]]
    held[Role.ACTIVATION] = 0.0 if unknown else held[Role.ACTIVATION] * rows
    bars = held.melt("strategy", [*ON_GPU_COLUMNS.values(), Role.OTHER], var_name="role", value_name="bytes")
    bars = bars.rename(columns={"strategy": "label"}).astype({"bytes": "Float64"}).fillna({"bytes": 0.0})
    missing = "" if len(unknown) == len(held) else f": not known of {listing(unknown)}"
    drawn = f"without activations{missing}" if unknown else f"activations of {rows} row{'' if rows == 1 else 's'}"
    card = "" if memory_bytes is None else f"GPU: {format_bytes(memory_bytes)}"
    figure = new_figure(ON_GPU, joined("predicted, not run", drawn, card))
    totals = stacked_bars(figure, bars, "role", ROLE_COLOURS, "bytes")
    said = f"{ON_GPU}: {byte_listing(totals)}."
    if memory_bytes is not None:
        draw_memory(figure, memory_bytes, float(totals.max()))
        fit = [str(label) for label in totals.index[totals <= memory_bytes]]
        said += f" {format_bytes(memory_bytes)} suffice for {listing(fit)}."
    if "rows_that_fit" in plans and plans["rows_that_fit"].notna().any():
        counts = ["" if pd.isna(number) else f", {format_count(number)} rows" for number in plans["rows_that_fit"]]
        figure.data[-1].text = [f"{words}{number}" for words, number in zip(figure.data[-1].text, counts, strict=True)]
        figure.update_layout(margin_r=1.7 * END_TEXT_PX)
    return finish(figure, said)


def _others_at_rest(plans: pd.DataFrame) -> "pd.Series[float]":
    """Bytes of buffers, which with the roles make what is at rest; 0 where they are too few to be seen."""
    rest = plans.get("rest_bytes", pd.Series(0.0, plans.index)).astype(float)
    roles = plans.reindex(columns=["parameter_bytes", "gradient_bytes", "optimizer_bytes", "offloaded_bytes"])
    others = rest - roles.astype("Float64").fillna(0.0).sum(axis=1).astype(float)
    return others.where(others > 1e-3 * rest, 0.0)


def draw_memory(figure: go.Figure, memory_bytes: float, longest: float) -> None:
    """A dashed line at the memory of a GPU, unless it is far beyond the ``longest`` bar, in bytes."""
    if memory_bytes < FAR * longest:
        divisor, _ = byte_scale(longest)
        figure.add_vline(
            x=memory_bytes / divisor, line={"color": INK, "width": 2, "dash": "dash"},
            annotation_text=f"GPU {format_bytes(memory_bytes)}", annotation_position="bottom right",
        )  # fmt: skip
        figure.update_xaxes(range=[0, 1.04 * max(longest, memory_bytes) / divisor])


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
    totals = stacked_bars(figure, held, "item", ROLE_COLOURS | PART_COLOURS, "bytes")
    tensors = held[held["item"].isin([str(role) for role in Role])].groupby("label")["bytes"].sum()
    parts = [
        f"{label} {format_bytes(whole)}, {format_bytes(tensors.get(label, 0.0))} of it in tensors"
        for label, whole in totals.items()
    ]
    return finish(figure, f"{PROCESS}: {'; '.join(parts)}.")
