"""Who holds which slice of each weight: matrices drawn to scale as they multiply, one colour per rank."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.rows import require_columns
from shardlab.plots.colours import GREY, PALETTE
from shardlab.plots.text import format_count, format_percent, listing
from shardlab.plots.theme import finish, new_figure, nothing

COLUMNS = ("parameter", "inputs", "outputs", "rank", "input_start", "input_stop", "output_start", "output_stop")
EVERY_RANK = -1
TITLE = "Who holds which slice of each weight"
NOTE = "laid out as in y = x A: inputs downward, outputs to the right; the strip below a matrix is its bias"
LABEL_PX, HEIGHT_PX = 54, 210  # space above a matrix, and height of the tallest one
CELL = "rgba(255,255,255,0.75)"


@dataclass(frozen=True)
class _Place:
    """Where a parameter is drawn: its upper left corner, and the height of one input."""

    left: float
    top: float
    per_input: float


def weight_slices(table: pd.DataFrame, head_dims: Mapping[str, int] | None = None) -> go.Figure:
    """Every parameter as a rectangle whose sides are its inputs and outputs, cut into what each rank holds.

    Args:
        table: from ``lab.weights_table``.
        head_dims: width of a head for parameters whose divided side consists of attention heads; dotted lines show the
            borders of heads.

    Raises:
        ValueError: a column is missing, or ``head_dims`` names a parameter that is not divided.
    """
    require_columns(table, COLUMNS, "table", "it comes from weights_table")
    if table.empty:
        return nothing(TITLE, "no parameters")
    figure = new_figure(TITLE, NOTE)
    places, bottom = _places(table)
    for rank in sorted(set(table["rank"]), key=lambda rank: (rank == EVERY_RANK, rank)):
        figure.add_trace(_bars(table[table["rank"] == rank], places, int(rank)))
    for name, head_dim in (head_dims or {}).items():
        _draw_heads(figure, table[table["parameter"] == name], places, name, head_dim)
    _label(figure, table, places, bottom)
    return finish(figure, _summary(table))


def _places(table: pd.DataFrame) -> tuple[dict[str, _Place], float]:
    """The place of each parameter, and the height of the figure in features: modules side by side in two rows."""
    whole = table.drop_duplicates("parameter")
    tallest = float(whole["inputs"].max())
    label, letter = tallest * LABEL_PX / HEIGHT_PX, tallest * 0.036
    gap, strip = tallest * 0.3, max(1.0, tallest * 0.045)
    modules = _by_module(whole)
    widths = [max(float(rows["outputs"].max()) + gap, letter * len(_short(module))) for module, rows in modules]
    places: dict[str, _Place] = {}
    left, top, bottom, first_shelf = 0.0, label, 0.0, True
    for (_, rows), width in zip(modules, widths, strict=True):
        if first_shelf and left >= sum(widths) / 2:
            left, top, first_shelf = 0.0, bottom + label, False
        below = top
        for name, inputs in zip(rows["parameter"], rows["inputs"], strict=True):
            thick = strip if inputs == 1 else float(inputs)
            places[name] = _Place(left, below, thick / inputs)
            below += thick + strip / 2
        left, bottom = left + width, max(bottom, below)
    return places, bottom


def _short(module: Hashable) -> str:
    return str(module).rpartition(".")[2]


def _by_module(whole: pd.DataFrame) -> list[tuple[Hashable, pd.DataFrame]]:
    return list(whole.groupby(whole["parameter"].str.rpartition(".")[0], sort=False))


def _bars(rows: pd.DataFrame, places: Mapping[str, _Place], rank: int) -> go.Bar:
    where = [places[name] for name in rows["parameter"]]
    owner = "every rank" if rank == EVERY_RANK else f"rank {rank}"
    return go.Bar(
        x=[place.left + start for place, start in zip(where, rows["output_start"], strict=True)],
        width=(rows["output_stop"] - rows["output_start"]).to_numpy(),
        base=[place.top + place.per_input * start for place, start in zip(where, rows["input_start"], strict=True)],
        y=[
            place.per_input * size
            for place, size in zip(where, rows["input_stop"] - rows["input_start"], strict=True)
        ],
        offset=0,
        name=owner,
        marker={"color": GREY if rank == EVERY_RANK else PALETTE[rank % len(PALETTE)], "line": {"color": CELL,
                "width": 1}},
        hovertext=[
            f"<b>{row['parameter']}</b> ({row['inputs']} x {row['outputs']})<br>{owner}: "
            f"inputs {row['input_start']} to {row['input_stop']}, outputs {row['output_start']} to {row['output_stop']}"
            for row in rows.to_dict("records")
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def _draw_heads(figure: go.Figure, rows: pd.DataFrame, places: Mapping[str, _Place], name: str, head_dim: int) -> None:
    """Draw the borders of heads inside the slices; the borders of slices are drawn already."""
    if name not in places or (rows["rank"] == EVERY_RANK).any():
        raise ValueError(f"head_dims: {name!r} is not a parameter that is divided")
    place, inputs, outputs = places[name], int(rows["inputs"].iloc[0]), int(rows["outputs"].iloc[0])
    by_inputs = (rows["input_stop"] - rows["input_start"] < inputs).all()
    borders = set(range(head_dim, inputs if by_inputs else outputs, head_dim))
    along: list[float | None] = []
    across: list[float | None] = []
    for border in sorted(borders - set(rows["input_start" if by_inputs else "output_start"])):
        along += [border, border, None]
        across += [0, outputs if by_inputs else inputs, None]
    x, y = (across, along) if by_inputs else (along, across)
    figure.add_scatter(
        x=[value if value is None else place.left + value for value in x],
        y=[value if value is None else place.top + value for value in y],
        mode="lines", line={"color": "#ffffff", "width": 1.5, "dash": "dot"}, hoverinfo="skip", showlegend=False,
        name=f"heads of {name}",
    )  # fmt: skip


def _label(figure: go.Figure, table: pd.DataFrame, places: Mapping[str, _Place], bottom: float) -> None:
    whole = table.drop_duplicates("parameter")
    for module, rows in _by_module(whole):
        first = rows.iloc[0]
        size = f"{first['inputs']} × {first['outputs']}" if first["inputs"] > 1 else f"{first['outputs']}"
        figure.add_annotation(
            x=places[first["parameter"]].left, y=places[first["parameter"]].top, xanchor="left", yanchor="bottom",
            text=f"{_short(module)}<br>{size}", showarrow=False, align="left", font_size=13,
        )  # fmt: skip
    tallest = float(whole["inputs"].max())
    right = max(places[name].left + outputs for name, outputs in zip(whole["parameter"], whole["outputs"], strict=True))
    figure.update_layout(barmode="overlay", height=int(160 + bottom * HEIGHT_PX / tallest), margin_r=60)
    figure.update_xaxes(visible=False, range=[-0.004 * right, 1.004 * right])
    figure.update_yaxes(visible=False, range=[1.004 * bottom, 0])


def _summary(table: pd.DataFrame) -> str:
    sides = [(table[f"{side}_stop"] - table[f"{side}_start"]) for side in ("input", "output")]
    held = (sides[0] * sides[1]).groupby(table["rank"]).sum()
    ranks = [rank for rank in held.index if rank != EVERY_RANK]
    total = float(held.sum())
    both = float(held.get(EVERY_RANK, 0.0))
    parts = [f"rank {rank} {format_percent(float(held[rank]) / total)}" for rank in ranks]
    return (
        f"{TITLE}: of {format_count(total)} elements {listing([*parts, f'every rank {format_percent(both / total)}'])}."
    )
