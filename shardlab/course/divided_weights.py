"""Which slice of each weight a rank holds under tensor parallelism: a table, and each weight as a matrix, to scale.

show(weight_slices(weights_table(model, slices)))
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from torch import nn

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


def weight_slices(table: pd.DataFrame, head_dims: Mapping[str, int] | None = None) -> go.Figure:
    """Every parameter as a rectangle whose sides are its inputs and outputs, cut into what each rank holds.

    Args:
        table: from ``weights_table``.
        head_dims: width of a head for parameters whose divided side consists of attention heads; dotted lines show the
            borders of heads.

    Raises:
        ValueError: ``head_dims`` names a parameter that is not divided.
    """
    figure = new_figure(WEIGHTS, WEIGHTS_NOTE)
    places, bottom = _placed(table.drop_duplicates("parameter"))
    rows = table.join(places[["left", "top", "scale"]], on="parameter")
    for rank in sorted(set(table["rank"]), key=lambda rank: (rank == EVERY_RANK, rank)):
        figure.add_trace(_rectangles(rows[rows["rank"] == rank], int(rank)))
    for name, head_dim in (head_dims or {}).items():
        figure.add_trace(_heads(rows[rows["parameter"] == name], name, head_dim))
    for first in places[places["is_first"]].to_dict("records"):
        size = f"{first['inputs']} × {first['outputs']}" if first["inputs"] > 1 else f"{first['outputs']}"
        figure.add_annotation(
            x=first["left"], y=first["top"], xanchor="left", yanchor="bottom", showarrow=False, align="left",
            text=f"{first['module'].rpartition('.')[2]}<br>{size}", font_size=13,
        )  # fmt: skip
    right, tallest = float((places["left"] + places["outputs"]).max()), float(places["inputs"].max())
    figure.update_layout(barmode="overlay", height=int(160 + bottom * HEIGHT_PX / tallest), margin_r=60)
    figure.update_xaxes(visible=False, range=[-0.004 * right, 1.004 * right])
    figure.update_yaxes(visible=False, range=[1.004 * bottom, 0])
    return finish(figure, _weights_summary(table))


def _placed(whole: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Where each parameter is drawn, and the height of the figure in features: modules side by side in two rows.

    Columns ``left`` and ``top`` are its upper left corner, ``scale`` the height of an input; ``module``; ``is_first``
    of its module.
    """
    tallest = float(whole["inputs"].max())
    gap, strip, label = tallest * 0.3, max(1.0, tallest * 0.045), tallest * LABEL_PX / HEIGHT_PX
    modules = list(whole.groupby(whole["parameter"].str.rpartition(".")[0], sort=False))
    widths = [
        max(float(rows["outputs"].max()) + gap, tallest * 0.036 * len(str(module).rpartition(".")[2]))
        for module, rows in modules
    ]
    places, left, top, bottom = [], 0.0, label, 0.0
    for (module, rows), width in zip(modules, widths, strict=True):
        if top == label and left >= sum(widths) / 2:
            left, top = 0.0, bottom + label
        below = top
        for row in rows.to_dict("records"):
            thick = strip if row["inputs"] == 1 else float(row["inputs"])
            at: dict[Any, Any] = {"left": left, "top": below, "scale": thick / row["inputs"], "is_first": below == top}
            places.append({**row, **at, "module": str(module)})
            below += thick + strip / 2
        left, bottom = left + width, max(bottom, below)
    return pd.DataFrame(places).set_index("parameter"), bottom


def _rectangles(rows: pd.DataFrame, rank: int) -> go.Bar:
    owner = "every rank" if rank == EVERY_RANK else f"rank {rank}"
    colour = ALL_RANKS if rank == EVERY_RANK else RANKS[rank % len(RANKS)]
    return go.Bar(
        x=rows["left"] + rows["output_start"], width=(rows["output_stop"] - rows["output_start"]).to_numpy(),
        base=rows["top"] + rows["scale"] * rows["input_start"], offset=0, name=owner,
        y=rows["scale"] * (rows["input_stop"] - rows["input_start"]),
        marker={"color": colour, "line": {"color": LIGHT, "width": 1}}, customdata=rows[list(COLUMNS)].to_numpy(),
        hovertemplate="<b>%{customdata[0]}</b> (%{customdata[1]} x %{customdata[2]})<br>inputs %{customdata[4]} to "
        "%{customdata[5]}, outputs %{customdata[6]} to %{customdata[7]}",
    )  # fmt: skip


def _heads(rows: pd.DataFrame, name: str, head_dim: int) -> go.Scatter:
    """The borders of heads inside the slices; the borders of slices are drawn already."""
    if rows.empty or (rows["rank"] == EVERY_RANK).any():
        raise ValueError(f"head_dims: {name!r} is not a parameter that is divided")
    place = rows.iloc[0]
    by_inputs = (rows["input_stop"] - rows["input_start"] < place["inputs"]).all()
    side, length = ("input", place["outputs"]) if by_inputs else ("output", place["inputs"])
    borders = set(range(head_dim, place[f"{side}s"], head_dim)) - set(rows[f"{side}_start"])
    along = [end for border in sorted(borders) for end in (border, border, None)]
    across = [0, length, None] * len(borders)
    x, y = (across, along) if by_inputs else (along, across)
    return go.Scatter(
        x=[None if value is None else place["left"] + value for value in x],
        y=[None if value is None else place["top"] + value for value in y],
        mode="lines", line={"color": "#ffffff", "width": 1.5, "dash": "dot"}, hoverinfo="skip", showlegend=False,
        name=f"heads of {name}",
    )  # fmt: skip


def _weights_summary(table: pd.DataFrame) -> str:
    elements = (table["input_stop"] - table["input_start"]) * (table["output_stop"] - table["output_start"])
    held = elements.groupby(table["rank"]).sum()
    shares = {rank: format_percent(float(size) / float(held.sum())) for rank, size in held.items()}
    both = shares.pop(EVERY_RANK, format_percent(0.0))
    parts = [*(f"rank {rank} {share}" for rank, share in shares.items()), f"every rank {both}"]
    return f"{WEIGHTS}: of {format_count(float(held.sum()))} elements {listing(parts)}."
