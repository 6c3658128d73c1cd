"""The look of every figure: transparent background, grey text that reads on light and dark, sizes for a projector.

One colour per role, collective, span kind and strategy, the same in every figure: eight hues near Okabe and Ito's,
moved to middle lightness. Each keeps a contrast of 2.9 or more against white AND against JupyterLab's dark background
(#111111), and any two differ for people with protanopia, deuteranopia or tritanopia (CIE 1976 distance 12 or more in
Machado's simulation; tests/plots measures both). What belongs together shares a hue: gradients and the reduce-scatter
that shards them are orange, gathered parameters and the all-gather that makes them are violet.

And what every curve does: logarithmic axes with readable ticks, fewer points than there are steps.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from shardlab.vocabulary import Collective, MeshAxis, ProcessPart, Role, SpanKind

BLUE = "#0072b2"
ORANGE = "#dd7710"
GREEN = "#009e73"
PINK = "#cc79a7"
VIOLET = "#885efb"
SAND = "#af8f4c"
WINE = "#ac2a58"
BROWN = "#8d571b"
GREY = "#7d7d7d"
PALETTE = (BLUE, ORANGE, GREEN, PINK, VIOLET, SAND, WINE, BROWN)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")

INK = "#797979"  # text: 4.3 to 1 on white and on #111111, the best any one grey can do on both
GRID = "rgba(128,128,128,0.25)"
EXPOSED = WINE
HIDDEN = "#8c96a6"

ROLE_COLOURS: dict[str, str] = {
    Role.PARAMETER: BLUE, Role.GATHERED_PARAMETER: VIOLET, Role.GRADIENT: ORANGE, Role.OPTIMIZER_STATE: GREEN,
    Role.MASTER_WEIGHT: BROWN, Role.COMMUNICATION_BUFFER: PINK, Role.ACTIVATION: SAND, Role.OFFLOADED: WINE,
    Role.OTHER: GREY, Role.UNATTRIBUTED: "#a0705a", Role.WORKSPACE: "#805080",
}  # fmt: skip

PART_COLOURS: dict[str, str] = {
    ProcessPart.HEAP: "#7a8450", ProcessPart.FREE_HEAP: "#96826e", ProcessPart.INTERPRETER: "#6b7fae",
    ProcessPart.LIBRARIES: "#5f8a8b", ProcessPart.SHARED_SEGMENTS: "#9a7b9a",
}  # fmt: skip

COLLECTIVE_COLOURS: dict[str, str] = {
    Collective.ALL_REDUCE: BLUE, Collective.REDUCE_SCATTER: ORANGE, Collective.ALL_GATHER: VIOLET,
    Collective.BROADCAST: GREEN, Collective.ALL_TO_ALL: PINK, Collective.SEND: SAND, Collective.RECV: BROWN,
    Collective.REDUCE: WINE, Collective.GATHER: "#8904fb", Collective.SCATTER: "#a0705a", Collective.BARRIER: GREY,
    Collective.UNKNOWN: "#4c6088",
}  # fmt: skip

AXIS_COLOURS: dict[str, str] = {
    MeshAxis.DATA: BLUE, MeshAxis.SHARD: VIOLET, MeshAxis.REPLICA: GREEN, MeshAxis.TENSOR: ORANGE,
}  # fmt: skip

SPAN_COLOURS: dict[str, str] = {
    SpanKind.DATA: "#b08d57", SpanKind.FORWARD: "#8c96a6", SpanKind.BACKWARD: "#5b6678", SpanKind.RECOMPUTE: "#936aaf",
    SpanKind.OPTIMIZER: "#1f8a70", SpanKind.OFF_CPU: "#c33222",
}  # fmt: skip

STRATEGY_COLOURS = {
    "single": GREY, "ddp": BLUE, "bucketed": ORANGE, "zero1": GREEN, "zero2": PINK, "zero3": VIOLET, "fsdp": WINE,
    "tensor_parallel": SAND,
    # torch's own engines have the colours of ours that they are compared with
    "torch_ddp": BLUE, "torch_zero1": GREEN, "torch_fsdp2": WINE, "torch_tp": SAND,
}  # fmt: skip

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
HEIGHT = 440
ROOM = 1.35  # factor beyond the outermost values of a logarithmic axis
MAX_POINTS = 2000  # of a curve
MANY_DECADES = 5  # with more, only powers of ten get labels

_AXIS = {
    "gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID, "automargin": True, "title": {"standoff": 12},
    "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)",  # space between names and bars, without tick marks
}  # fmt: skip

TEMPLATE = go.layout.Template(
    layout={
        "autosize": True,
        "height": HEIGHT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(PALETTE),
        "font": {"family": FONT, "size": 15, "color": INK},
        "title": {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
                  "pad": {"l": 12, "t": 14}, "font": {"size": 20}, "subtitle": {"font": {"size": 14, "color": INK}}},
        "margin": {"l": 12, "r": 24, "t": 84, "b": 12},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom",
                   "bgcolor": "rgba(0,0,0,0)"},
        "hoverlabel": {"bgcolor": "#23272e", "bordercolor": INK, "align": "left",
                       "font": {"color": "#f4f4f4", "size": 14, "family": FONT}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": PALETTE[0]},
        "bargap": 0.35,
    }
)  # fmt: skip


def new_figure(title: str, subtitle: str = "") -> go.Figure:
    """An empty figure with the common look."""
    figure = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}})
    if subtitle:
        figure.update_layout(title_subtitle_text=subtitle)
    return figure


def finish(figure: go.Figure, summary: str) -> go.Figure:
    """Attach the plain-text summary that screen readers, ``show`` and the report use."""
    # JupyterLab draws a figure without an explicit height lower than the template says.
    figure.update_layout(meta={"summary": summary}, height=figure.layout.height or HEIGHT)
    return figure


def nothing(title: str, reason: str) -> go.Figure:
    """A figure that says why there is nothing to draw."""
    figure = new_figure(title)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=reason, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=18)
    return finish(figure, f"{title}: {reason}.")


def summary_of(figure: go.Figure) -> str:
    """The summary attached by ``finish``, else the title."""
    meta = figure.layout.meta
    return str(meta["summary"]) if isinstance(meta, dict) and "summary" in meta else str(figure.layout.title.text or "")


def log_axis(values: Sequence[float], words: Callable[[float], str]) -> dict[str, Any]:
    """A logarithmic axis around positive values, with two ticks or more, at 1, 2 and 5 times powers of ten.

    Args:
        values: the values that are drawn.
        words: the label of a tick.
    """
    low, high = min(values) / ROOM, max(values) * ROOM
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    factors = (1.0, 2.0, 5.0) if len(powers) <= MANY_DECADES else (1.0,)
    every = [factor * power for power in powers for factor in factors]
    ticks = [tick for tick in every if low <= tick <= high]
    if len(ticks) < 2:  # values that are nearly equal: as far as the ticks around them
        low, high = max(tick for tick in every if tick <= low), min(tick for tick in every if tick >= high)
        ticks = [tick for tick in every if low <= tick <= high]
    return {
        "type": "log", "range": [math.log10(low), math.log10(high)], "tickvals": ticks,
        "ticktext": [words(tick) for tick in ticks],
    }  # fmt: skip


def thinned(values: ArrayLike, limit: int = MAX_POINTS) -> NDArray[np.intp]:
    """Positions to draw, ascending: all of them, or the lowest and the highest of each of ``limit / 2`` stretches.

    Both ends and the highest point are always among them: the point that matters in a figure of memory.

    Args:
        values: the heights of the curve, in the order of drawing; finite.
        limit: the approximate number of points to draw.
    """
    heights = np.asarray(values, dtype=np.float64)
    if len(heights) <= limit:
        return np.arange(len(heights))
    edges = np.linspace(0, len(heights), limit // 2 + 1).astype(np.intp)
    extremes = [
        begin + place
        for begin, end in pairwise(edges)
        for place in (int(np.argmin(heights[begin:end])), int(np.argmax(heights[begin:end])))
    ]
    return np.unique(np.asarray([0, *extremes, len(heights) - 1], dtype=np.intp))


def thinning_note(num_given: int, num_drawn: int, what: str) -> str:
    """A note that the figure does not draw everything; empty if it does."""
    return f"{num_given:,} {what} drawn as {num_drawn:,}" if num_drawn < num_given else ""


def readable_on(colour: str) -> str:
    """Black or white, whichever stands out more from ``colour`` ('#rrggbb'): WCAG 2 contrast."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def run_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: strategies have their own, other names get the unused colours of the palette in order."""
    unique = list(dict.fromkeys(names))
    chosen = {name: STRATEGY_COLOURS[name] for name in unique if name in STRATEGY_COLOURS}
    free = [colour for colour in PALETTE if colour not in chosen.values()] or list(PALETTE)
    others = [name for name in unique if name not in chosen]
    return chosen | {name: free[index % len(free)] for index, name in enumerate(others)}


def dash(name: str) -> str:
    """Line style of a run: torch's own engines are dotted, ours solid."""
    return "dot" if name.startswith("torch_") else "solid"
