"""Bytes on the wire: what each run sends, by collective; which rank sends to which; what attention sends over ranks."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.analysis import wire_bytes
from shardlab.analysis.matching import with_group
from shardlab.analysis.rows import labelled, labels_of, of_steps, one_run, one_step
from shardlab.plots.bars import stacked_bars
from shardlab.plots.text import averaged, byte_listing, byte_scale, format_bytes, subtitle
from shardlab.plots.theme import COLLECTIVE_COLOURS, finish, new_figure, nothing
from shardlab.records.tables import COLLECTIVES
from shardlab.vocabulary import Collective

VOLUME = "Bytes on the wire per rank and step"
MATRIX = "Bytes between ranks in a step"
MAX_WRITTEN = 16  # up to this many ranks a cell has room for its number
SHADES = ((0.0, "#c4e3f3"), (1.0, "#3a95c9"))  # all contrast with white and with black, and black text with all
SILENT = (Collective.RECV, Collective.BARRIER)


def wire_volume(collectives: pd.DataFrame, runs: Sequence[str] | None = None) -> go.Figure:
    """Bytes that a rank sends in a step, by collective, one bar per run: the mean over ranks and steps.

    Collectives of the setup (step -1) and those that report a loss after its step are left out; so are those whose
    bytes an imported trace does not contain, which the figure says.

    Args:
        collectives: table ``collectives``.
        runs: names in the order of the bars; a run without collectives, such as a single process, gets an empty bar.
            None for the runs of the table.

    Raises:
        ValueError: ``runs`` is one name, and no list.
    """
    if isinstance(runs, str):
        raise ValueError(f"runs: {runs!r} is given; give a list of names, such as [{runs!r}]")
    COLLECTIVES.check(collectives)
    rows = labelled(of_steps(collectives[collectives["step"] >= 0]))
    order = [*dict.fromkeys([*(runs or []), *labels_of(rows)])]
    if not order:
        return nothing(VOLUME, "no communication recorded")
    silent = pd.DataFrame({"label": order, "op": "", "bytes": 0.0})
    bars = pd.concat([silent, _per_rank_and_step(rows)], ignore_index=True) if len(rows) else silent
    unknown = int(rows["wire_bytes"].isna().sum())
    left_out = f"without {unknown} whose bytes are not known" if unknown else ""
    words = (averaged(rows, "mean"), "by the ring formula", left_out)
    figure = new_figure(VOLUME, subtitle(rows, ", ".join(part for part in words if part)))
    totals = stacked_bars(figure, bars, "op", COLLECTIVE_COLOURS, "bytes sent")
    return finish(figure, f"{VOLUME}{f' ({left_out})' if left_out else ''}: {byte_listing(totals)}.")


def _per_rank_and_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns label, op, bytes: the sum over a run divided by its number of (rank, step) pairs."""
    sums = labelled(wire_bytes(rows.drop(columns="label")))
    sent = sums.groupby(["label", "op"])["wire_bytes"].sum().reset_index(name="bytes")
    pairs = rows.drop_duplicates(["label", "rank", "step"]).groupby("label").size()
    return sent.assign(bytes=sent["bytes"] / sent["label"].map(pairs))


def traffic_matrix(
    collectives: pd.DataFrame, *, run: str | None = None, step: int | None = None, axes: Mapping[str, int] | None =
    None,
) -> go.Figure:  # fmt: skip
    """A matrix of ranks: the rank of a row sends to the rank of a column.

    A collective on a ring sends a rank's bytes (``wire_bytes``) to its next neighbour in the group; an all-to-all sends
    an equal share to every other member. The groups follow from the axes of the mesh. What reports a loss after its
    step is left out.

    Args:
        collectives: table ``collectives``.
        run: which run; None where the table holds one.
        step: which step; None for the last.
        axes: names and sizes of the axes of the mesh, outermost first, as in the manifest; None reads them from the
            rows.

    Raises:
        ValueError: there is no such run or step, the axes do not fit the rows, or there is a send, whose receiver a
            record does not name.
    """
    COLLECTIVES.check(collectives)
    if not len(collectives := of_steps(collectives)):
        return nothing(MATRIX, "no communication recorded")
    rows = one_run(collectives, run)
    step = one_step(rows, step)
    label = str(rows["label"].iloc[0])
    rows = rows[rows["step"] == step]
    sent = bytes_between(with_group(rows.drop(columns="label"), axes))
    names = [str(rank) for rank in range(len(sent))]
    note = "each row's rank sends to the column's rank; a dot is the rank itself"
    figure = new_figure(f"{MATRIX}: {label}, step {step}", subtitle(rows, note))
    divisor, unit = byte_scale(float(sent.max()))
    is_written = len(names) <= MAX_WRITTEN
    figure.add_heatmap(
        z=np.where(sent > 0, sent / divisor, np.nan), x=names, y=names, xgap=2, ygap=2, zmin=0,
        zmax=float(sent.max()) / divisor or 1.0, colorscale=SHADES, showscale=not is_written,
        colorbar={"title": {"text": unit, "side": "top"}, "outlinewidth": 0, "thickness": 14, "len": 0.9},
        text=[[format_bytes(value) if value else "" for value in row] for row in sent],
        texttemplate="%{text}" if is_written else None, textfont={"color": "#000000"},
        hovertemplate="rank %{y} sends rank %{x}<br><b>%{text}</b><extra></extra>", hoverongaps=False,
    )  # fmt: skip
    _axes(figure, names)
    return finish(figure, _matrix_summary(sent, label, step))


def bytes_between(grouped: pd.DataFrame) -> NDArray[np.float64]:
    """Bytes from each rank (row) to each rank (column) in one step.

    Args:
        grouped: rows of table ``collectives`` with the column ``group`` (``analysis.with_group``).

    Raises:
        ValueError: there is a send, whose receiver a record does not name.
    """
    grouped = grouped[~grouped["op"].isin([str(op) for op in SILENT])]
    if (grouped["op"] == Collective.SEND).any():
        raise ValueError("collectives: a send does not record its receiver, so the matrix is unknown; leave out 'send'")
    members = {group: [int(rank) for rank in str(group).split(",")] for group in grouped["group"].unique()}
    size = 1 + max([*grouped["rank"], *(rank for ranks in members.values() for rank in ranks)], default=0)
    sent = np.zeros((size, size))
    sums = grouped.groupby(["group", "rank", grouped["op"] == Collective.ALL_TO_ALL])["wire_bytes"].sum()
    for key, num_bytes in sums.items():
        group, rank, to_all = cast("tuple[str, int, bool]", key)
        place = members[group].index(rank)
        after = members[group][place + 1 :] + members[group][:place]  # around the ring
        to = after if to_all else after[:1]
        sent[rank, to] += num_bytes / max(1, len(to))
    return sent


def _axes(figure: go.Figure, names: list[str]) -> None:
    side = max(300, min(620, 44 * len(names)))
    figure.update_layout(height=side + 150, margin_r=80)
    figure.update_xaxes(title_text="to rank", type="category", showgrid=False, zeroline=False, constrain="domain")
    figure.update_yaxes(
        title_text="from rank", type="category", autorange="reversed", showgrid=False, zeroline=False,
        scaleanchor="x", constrain="domain",
    )  # fmt: skip
    for position in range(len(names)):  # no rank sends to itself; the dots make the diagonal easy to follow
        if len(names) <= MAX_WRITTEN:
            figure.add_annotation(x=position, y=position, text="·", showarrow=False)


def _matrix_summary(sent: NDArray[np.float64], label: str, step: int) -> str:
    pairs = sent[sent > 0]
    if not len(pairs):
        return f"Step {step} of run {label}: {len(sent)} ranks send nothing."
    low, high = format_bytes(float(pairs.min())), format_bytes(float(pairs.max()))
    amount = low if low == high else f"{low} to {high}"
    return (
        f"Step {step} of run {label}: {len(sent)} ranks send over {len(pairs)} links from rank to rank, "
        f"{amount} on each, {format_bytes(float(sent.sum()))} in all, by the ring model."
    )


TITLE = "What a rank sends for the attention of a layer"
EXCHANGES = "ulysses"
DASHES = ("solid", "dash", "dot", "dashdot")


def context_traffic(sent: pd.DataFrame) -> go.Figure:
    """Draw what each way sends over the number of ranks; a diamond where two send the same.

    Args:
        sent: columns ``way``, ``ranks``, ``heads_per_key`` (heads for each key-value head), and ``sent``, in times of
            a rank's own keys and values; of ways that do not exchange heads, one line is drawn.
    """
    is_exchange = sent["way"] == EXCHANGES
    others = sent[~is_exchange].groupby("ranks")["sent"].max()
    figure = new_figure(TITLE, "in times of its own keys and values; backward sends as much again")
    figure.add_scatter(
        x=others.index, y=others, name=" or ".join(sent[~is_exchange]["way"].unique()), mode="lines",
        line={"color": COLLECTIVE_COLOURS[Collective.ALL_GATHER], "width": 4},
    )  # fmt: skip
    said = []
    for place, (heads, rows) in enumerate(sent[is_exchange].groupby("heads_per_key")):
        own = rows.set_index("ranks")["sent"]
        colour, words = COLLECTIVE_COLOURS[Collective.ALL_TO_ALL], f"{heads} head{'s' * (heads != 1)} a key"
        figure.add_scatter(
            x=own.index, y=own, name=f"{EXCHANGES}, {words}", mode="lines",
            line={"color": colour, "width": 3, "dash": DASHES[place % len(DASHES)]},
        )  # fmt: skip
        equal = own[own == others.reindex(own.index)]
        figure.add_scatter(
            x=equal.index, y=equal, mode="markers", showlegend=False, name=f"equal, {words}",
            marker={"color": colour, "size": 13, "symbol": "diamond"},
        )  # fmt: skip
        less = own[own < others.reindex(own.index)].index
        said.append(f"with {words} from {less.min()} ranks on" if len(less) else f"with {words} on none of these")
    figure.update_xaxes(title_text="ranks")
    figure.update_yaxes(title_text="sent", rangemode="tozero")
    return finish(figure, f"{EXCHANGES} sends less {', '.join(said)}.")
