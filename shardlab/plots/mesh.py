"""The mesh of ranks: which ranks communicate on which axis."""

from collections.abc import Mapping
from itertools import product
from math import prod

import plotly.graph_objects as go

from shardlab.plots.colours import AXIS_COLOURS, GREY
from shardlab.plots.text import listing
from shardlab.plots.theme import finish, new_figure

TITLE = "The mesh"
ROW_PX, BAND_PX, RANK_PX = 120, 26, 60


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
    figure = new_figure(TITLE, f"{' x '.join(f'{name} {size}' for name, size in axes.items())}; a band is a group")
    grid = [[row * inner[1] + column for column in range(inner[1])] for row in range(outer[1])]
    groups = {inner[0]: grid, outer[0]: [list(line) for line in zip(*grid, strict=True)]}
    for name in axes:
        _bands(figure, name, groups[name], inner[1])
    _ranks(figure, outer, inner, num_ranks // hosts if hosts > 1 else None)
    _axes(figure, outer, inner)
    return finish(figure, _summary(axes, groups))


def _bands(figure: go.Figure, name: str, groups: list[list[int]], width: int) -> None:
    colours = {str(axis): colour for axis, colour in AXIS_COLOURS.items()}
    xs: list[int | None] = []
    ys: list[int | None] = []
    for group in groups:
        xs += [*(rank % width for rank in group), None]
        ys += [*(rank // width for rank in group), None]
    figure.add_scatter(
        x=xs, y=ys, mode="lines", line={"color": colours.get(name, GREY), "width": BAND_PX}, opacity=0.75,
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
        x=[column for _, column in places],
        y=[row for row, _ in places],
        mode="markers+text",
        marker={"size": RANK_PX, "color": "#3d4654", "line": {"color": "rgba(255,255,255,0.75)", "width": 2}},
        text=[f"<b>{rank}</b>{host}" for rank, host in zip(ranks, words, strict=True)],
        textfont={"color": "#ffffff", "size": 15},
        customdata=[[f"rank {rank}", where] for rank, where in zip(ranks, coordinates, strict=True)],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
        showlegend=False,
        name="ranks",
    )


def _axes(figure: go.Figure, outer: tuple[str, int], inner: tuple[str, int]) -> None:
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


def _summary(axes: Mapping[str, int], groups: Mapping[str, list[list[int]]]) -> str:
    words = [
        f"{name} groups {listing([','.join(map(str, group)) for group in groups[name]])}" for name in [*axes][::-1]
    ]
    shape = " x ".join(f"{name} {size}" for name, size in axes.items())
    return f"A mesh of {prod(axes.values())} ranks, {shape}: {'; '.join(words)}."
