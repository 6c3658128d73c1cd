"""Where the ranks are in the mesh, and which slices of the parameters each of them holds.

Slices lie along the elements of all parameters, or in each weight as it multiplies, as a matrix drawn to scale.
"""

from collections.abc import Hashable, Mapping
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.rows import one_run, require_columns
from shardlab.plots.bars import gaps
from shardlab.plots.text import COUNT_UNITS, format_bytes, format_count, format_percent, listing, scale, subtitle
from shardlab.plots.theme import ALL_RANKS, AXIS_COLOURS, GRID, INK, RANKS, finish, new_figure, nothing
from shardlab.tables import SHARDS

MESH = "The mesh"
ROW_PX, BAND_PX, RANK_PX = 120, 26, 60
MIN_LABEL_SHARE = 0.06
PLOT_PX, LETTER_PX = 700, 6.2  # a typical width of the plot; width of a letter of a slanted name
COLUMNS = ("parameter", "inputs", "outputs", "rank", "input_start", "input_stop", "output_start", "output_stop")
EVERY_RANK = -1
WEIGHTS = "Who holds which slice of each weight"
WEIGHTS_NOTE = "laid out as in y = x A: inputs downward, outputs to the right; the strip below a matrix is its bias"
LABEL_PX, HEIGHT_PX = 54, 210  # space above a matrix, and height of the tallest one
LIGHT = "rgba(255,255,255,0.75)"


def mesh_map(axes: Mapping[str, int], hosts: int = 1) -> go.Figure:
    """The ranks in a grid; a band joins the ranks of a group, in the colour of its axis.

    Args:
        axes: size of each axis by name, outermost first, as ``Mesh`` takes it; one or two axes.
        hosts: number of machines, each with consecutive ranks; with several, each rank is labelled with its host.

    Raises:
        ValueError: there are no axes or more than two, a size is below 1, or ``hosts`` does not divide the ranks.
    """
    if not 1 <= len(axes) <= 2 or min(axes.values()) < 1:
        raise ValueError(f"axes: {dict(axes)}; one or two axes of size 1 or more can be drawn")
    num_ranks = prod(axes.values())
    if hosts < 1 or num_ranks % hosts:
        raise ValueError(f"hosts: {hosts} does not divide {num_ranks} ranks")
    outer, inner = [("", 1), *axes.items()][-2:]
    figure = new_figure(MESH, f"{' x '.join(f'{name} {size}' for name, size in axes.items())}; a band is a group")
    grid = [[row * inner[1] + column for column in range(inner[1])] for row in range(outer[1])]
    groups = {inner[0]: grid, outer[0]: [list(line) for line in zip(*grid, strict=True)]}
    for name in axes:
        _bands(figure, name, groups[name], inner[1])
    _ranks(figure, outer, inner, num_ranks // hosts if hosts > 1 else None)
    _mesh_axes(figure, outer, inner)
    return finish(figure, _mesh_summary(axes, groups))


def _bands(figure: go.Figure, name: str, groups: list[list[int]], width: int) -> None:
    xs: list[int | None] = []
    ys: list[int | None] = []
    for group in groups:
        xs += [*(rank % width for rank in group), None]
        ys += [*(rank // width for rank in group), None]
    figure.add_scatter(
        x=xs, y=ys, mode="lines", line={"color": AXIS_COLOURS.get(name, INK), "width": BAND_PX},
        name=f"{name} groups", hoverinfo="skip",
    )  # fmt: skip


def _ranks(figure: go.Figure, outer: tuple[str, int], inner: tuple[str, int], per_host: int | None) -> None:
    places = list(product(range(outer[1]), range(inner[1])))
    ranks = [row * inner[1] + column for row, column in places]
    words = ["" if per_host is None else f"<br><sup>host {rank // per_host}</sup>" for rank in ranks]
    coordinates = [
        ", ".join(f"{name} {place}" for (name, _), place in zip((outer, inner), where, strict=True) if name)
        for where in places
    ]
    figure.add_scatter(
        x=[column for _, column in places], y=[row for row, _ in places], mode="markers+text",
        marker={"size": RANK_PX, "color": "#3d4654", "line": {"color": "rgba(255,255,255,0.75)", "width": 2}},
        text=[f"<b>{rank}</b>{host}" for rank, host in zip(ranks, words, strict=True)],
        textfont={"color": "#ffffff", "size": 15},
        customdata=[[f"rank {rank}", where] for rank, where in zip(ranks, coordinates, strict=True)],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>", showlegend=False, name="ranks",
    )  # fmt: skip


def _mesh_axes(figure: go.Figure, outer: tuple[str, int], inner: tuple[str, int]) -> None:
    figure.update_layout(height=190 + ROW_PX * outer[1], margin_t=120)
    grid = {"showgrid": False, "zeroline": False}
    # Equal scales: neighbours are equally near in both directions.
    figure.update_xaxes(
        range=[-0.6, inner[1] - 0.4], side="top", tickvals=list(range(inner[1])), constrain="domain",
        ticktext=[f"{inner[0]} {place}" for place in range(inner[1])], **grid,
    )  # fmt: skip
    figure.update_yaxes(
        range=[outer[1] - 0.4, -0.6], tickvals=list(range(outer[1])) if outer[0] else [], scaleanchor="x",
        scaleratio=0.6, constrain="domain", ticktext=[f"{outer[0]} {place}" for place in range(outer[1])], **grid,
    )  # fmt: skip


def _mesh_summary(axes: Mapping[str, int], groups: Mapping[str, list[list[int]]]) -> str:
    words = [
        f"{name} groups {listing([','.join(map(str, group)) for group in groups[name]])}" for name in [*axes][::-1]
    ]
    shape = " x ".join(f"{name} {size}" for name, size in axes.items())
    return f"A mesh of {prod(axes.values())} ranks, {shape}: {'; '.join(words)}."


def shard_map(shards: pd.DataFrame, run: str | None = None, role: str = "parameter") -> go.Figure:
    """The slices of one role that each rank holds, along the elements of all parameters.

    Args:
        shards: table ``shards``.
        run: which run; None where the table holds one.
        role: 'parameter', 'gradient' or 'optimizer_state'.

    Raises:
        ValueError: there is no such run or role, or there are several runs and none is named.
    """
    SHARDS.check(shards)
    if not len(shards):
        return nothing("Who holds which slice", "no shards recorded")
    rows = one_run(shards, run)
    roles = sorted(set(rows["role"]))
    if role not in roles:
        raise ValueError(f"role: {role!r} is not one of {', '.join(roles)}")
    extents = _extents(rows)
    rows = rows[(rows["role"] == role) & (rows["step"] == rows["step"].max())]
    rows = rows.drop_duplicates(["rank", "parameter", "start", "stop"])
    words = f"Who holds which slice of the {role.replace('_', ' ')}s: {rows['label'].iloc[0]}"
    figure = new_figure(words.replace("states:", "state:"), subtitle(rows, f"{format_count(_end(extents))} elements"))
    divisor, unit = scale(_end(extents), COUNT_UNITS)
    ranks = sorted(int(rank) for rank in set(rows["rank"]))
    for rank in ranks:
        figure.add_trace(_slices(rows[rows["rank"] == rank], extents, rank, divisor))
    _shard_axes(figure, extents, ranks, (divisor, unit))
    return finish(figure, _shard_summary(rows, role, _end(extents)))


def _extents(rows: pd.DataFrame) -> pd.DataFrame:
    """First element and number of elements of each parameter, by name, bucket by bucket.

    Within a bucket, rank after rank: that is their order in a flat bucket, of which each rank lists its own part.
    """
    places = {bucket: place for place, bucket in enumerate(rows["bucket"].drop_duplicates())}
    rows = rows.sort_values("bucket", key=lambda buckets: buckets.map(places), kind="stable")
    shapes = rows.drop_duplicates("parameter").set_index("parameter")["shape"]
    numel = shapes.map(lambda shape: prod(int(size) for size in str(shape).split("x") if size.strip("()").isdigit()))
    return pd.DataFrame({"begin": numel.cumsum() - numel, "numel": numel}).astype("int64")


def _end(extents: pd.DataFrame) -> int:
    return int(extents["numel"].sum())


def _slices(rows: pd.DataFrame, extents: pd.DataFrame, rank: int, divisor: float) -> go.Bar:
    begin = rows["parameter"].map(extents["begin"]).to_numpy(dtype=np.float64)
    start, stop = rows["start"].to_numpy(dtype=np.float64), rows["stop"].to_numpy(dtype=np.float64)
    return go.Bar(
        base=(begin + start) / divisor, x=(stop - start) / divisor, y=[rank] * len(rows), width=0.72,
        orientation="h", name=f"rank {rank}",
        marker={"color": RANKS[rank % len(RANKS)], "line": gaps(stop - start, _end(extents))},
        hovertext=[
            f"<b>{row['parameter']}</b> ({row['shape']})<br>rank {rank}: elements {row['start']:,} to {row['stop']:,}"
            f"<br>{row['stop'] - row['start']:,} elements, {format_bytes(row['bytes'])}"
            + (f"<br>bucket {row['bucket']}" if row["bucket"] >= 0 else "")
            for row in rows.to_dict("records")
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def _shard_axes(figure: go.Figure, extents: pd.DataFrame, ranks: list[int], unit: tuple[float, str]) -> None:
    """Ranks downward; borders of parameters as lines; names above the parameters that are wide enough."""
    divisor, name = unit
    end, overhang = _end(extents), 0.0
    for begin in extents["begin"][1:]:
        figure.add_vline(x=begin / divisor, line={"color": GRID, "width": 1})
    for parameter, extent in extents.iterrows():
        if extent["numel"] >= MIN_LABEL_SHARE * end:
            middle = extent["begin"] + extent["numel"] / 2
            is_level = extent["numel"] / end > 0.15  # else it is narrower than its name, which is slanted
            figure.add_annotation(
                x=middle / divisor, y=1, yref="paper", yanchor="bottom", text=str(parameter), showarrow=False,
                font_size=12, **({"textangle": 0} if is_level else {"textangle": -30, "xanchor": "left"}),
            )  # fmt: skip
            if not is_level:  # by how much it exceeds the right end, in a plot of typical width
                beside = PLOT_PX * (1 - middle / end)
                overhang = max(overhang, float(LETTER_PX * len(str(parameter)) - beside))
    figure.update_layout(barmode="overlay", height=max(346, 246 + 40 * len(ranks)), showlegend=False)
    figure.update_layout(margin_t=150, margin_r=24 + overhang)
    figure.update_xaxes(title_text=f"element ({name})" if name else "element", range=[0, end / divisor],
                        showgrid=False)  # fmt: skip
    figure.update_yaxes(tickvals=ranks, ticktext=[f"rank {rank}" for rank in ranks], showgrid=False,
                        range=[max(ranks) + 0.5, min(ranks) - 0.5])  # fmt: skip


def _shard_summary(rows: pd.DataFrame, role: str, numel: int) -> str:
    held = (rows["stop"] - rows["start"]).groupby(rows["rank"]).sum()
    low, high = int(held.min()), int(held.max())
    amount = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    share = format_percent(low / numel) + ("" if low == high else f" to {format_percent(high / numel)}")
    return (
        f"Run {rows['run'].iloc[0]}, {role.replace('_', ' ')}, {numel:,} elements: "
        f"each of {len(held)} ranks holds {amount} elements ({share})."
    )


class _Place(NamedTuple):
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
        return nothing(WEIGHTS, "no parameters")
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
