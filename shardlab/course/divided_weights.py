"""Which slice of each weight a rank holds under tensor parallelism: a table, and each weight as a matrix, to scale.

show(weight_slices(weights_table(model, slices)))
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go
from torch import nn

from shardlab.analysis.rows import require_columns
from shardlab.partition.slices import TensorSlice
from shardlab.plots.text import format_count, format_percent, listing
from shardlab.plots.theme import ALL_RANKS, RANKS, finish, new_figure

COLUMNS = ("parameter", "inputs", "outputs", "rank", "input_start", "input_stop", "output_start", "output_stop")
EVERY_RANK = -1
WEIGHTS = "Who holds which slice of each weight"
WEIGHTS_NOTE = "laid out as in y = x A: inputs downward, outputs to the right; the strip below a matrix is its bias"
LABEL_PX, HEIGHT_PX = 54, 210  # space above a matrix, and height of the tallest one
LIGHT = "rgba(255,255,255,0.75)"


def weights_table(model: nn.Module, slices: Mapping[str, TensorSlice]) -> pd.DataFrame:
    """One row per parameter, rank and range, for ``weight_slices``.

    A weight is laid out as it multiplies, y = x A: inputs downward, outputs to the right. This is the transpose of what
    a linear layer stores, so the slices of a column-parallel layer are columns. An embedding, whose input is a token,
    is stored this way already.

    Args:
        model: the plain, whole model; the meta device is enough.
        slices: slices of the divided model by parameter name, from any rank (``partition.slices.slices_of``).

    Returns:
        ``parameter``; ``inputs`` and ``outputs`` of the whole (a bias or a norm has 1 input); ``rank``, -1 if every
        rank holds all of it; the elements held, as ``input_start``, ``input_stop``, ``output_start``, ``output_stop``.
    """
    rows = [
        row
        for name, param in model.named_parameters()  # tied weights once
        for row in _rows(model.get_submodule(name.rpartition(".")[0]), name, tuple(param.shape), slices.get(name))
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(owner: nn.Module, name: str, shape: tuple[int, ...], own: TensorSlice | None) -> Iterator[dict[str, Any]]:
    """The rows of one parameter of ``owner``; a vector is a row of outputs."""
    is_transposed = isinstance(owner, nn.Linear) and len(shape) == 2
    inputs, outputs = (shape[::-1] if is_transposed else shape) if len(shape) == 2 else (1, shape[0])
    whole = {
        "parameter": name, "inputs": inputs, "outputs": outputs, "rank": EVERY_RANK,
        "input_start": 0, "input_stop": inputs, "output_start": 0, "output_stop": outputs,
    }  # fmt: skip
    if own is None:
        yield whole
        return
    side = "output" if len(shape) == 1 or (own.dim == 0) == is_transposed else "input"
    for rank in range(own.num_ranks):
        for start, stop in own.of_rank(rank).ranges:
            yield {**whole, "rank": rank, f"{side}_start": start, f"{side}_stop": stop}


class _Place(NamedTuple):
    """Where a parameter is drawn: its upper left corner, and the height of one input."""

    left: float
    top: float
    per_input: float


def weight_slices(table: pd.DataFrame, head_dims: Mapping[str, int] | None = None) -> go.Figure:
    """Every parameter as a rectangle whose sides are its inputs and outputs, cut into what each rank holds.

    Args:
        table: from ``weights_table``.
        head_dims: width of a head for parameters whose divided side consists of attention heads; dotted lines show the
            borders of heads.

    Raises:
        ValueError: a column is missing, or ``head_dims`` names a parameter that is not divided.
    """
    require_columns(table, COLUMNS, "table", "it comes from weights_table")
    figure = new_figure(WEIGHTS, WEIGHTS_NOTE)
    places, bottom = _places(table)
    for rank in sorted(set(table["rank"]), key=lambda rank: (rank == EVERY_RANK, rank)):
        figure.add_trace(_rectangles(table[table["rank"] == rank], places, int(rank)))
    for name, head_dim in (head_dims or {}).items():
        _draw_heads(figure, table[table["parameter"] == name], places, name, head_dim)
    _label_modules(figure, table, places, bottom)
    return finish(figure, _weights_summary(table))


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


def _rectangles(rows: pd.DataFrame, places: Mapping[str, _Place], rank: int) -> go.Bar:
    where = pd.DataFrame([places[name] for name in rows["parameter"]], index=rows.index)
    owner = "every rank" if rank == EVERY_RANK else f"rank {rank}"
    colour = ALL_RANKS if rank == EVERY_RANK else RANKS[rank % len(RANKS)]
    return go.Bar(
        x=where["left"] + rows["output_start"], width=(rows["output_stop"] - rows["output_start"]).to_numpy(),
        base=where["top"] + where["per_input"] * rows["input_start"], offset=0, name=owner,
        y=where["per_input"] * (rows["input_stop"] - rows["input_start"]),
        marker={"color": colour, "line": {"color": LIGHT, "width": 1}},
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


def _label_modules(figure: go.Figure, table: pd.DataFrame, places: Mapping[str, _Place], bottom: float) -> None:
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


def _weights_summary(table: pd.DataFrame) -> str:
    sides = [(table[f"{side}_stop"] - table[f"{side}_start"]) for side in ("input", "output")]
    held = (sides[0] * sides[1]).groupby(table["rank"]).sum()
    ranks = [rank for rank in held.index if rank != EVERY_RANK]
    total = float(held.sum())
    both = float(held.get(EVERY_RANK, 0.0))
    parts = [f"rank {rank} {format_percent(float(held[rank]) / total)}" for rank in ranks]
    parts.append(f"every rank {format_percent(both / total)}")
    return f"{WEIGHTS}: of {format_count(total)} elements {listing(parts)}."
