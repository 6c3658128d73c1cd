"""The look of every figure: dark text on white paper, colours that stand on a dark page too, sizes for a projector.

The paper is opaque, because no grey reads at 4.5 to 1 both on white and in a dark notebook. A page that knows its own
ground (the report, the site) takes the paper away and gives the text its own colour; so does a notebook.

Roles, parts of a process, collectives, what a rank does, runs, ranks, units and axes each have a family of colours, and
no colour stands in two of them. Each has a contrast of 3 or more against white AND against the dark pages (#111315).
Any two of the runs, ranks, units, axes, kinds of span or usual roles differ for people with protanopia, deuteranopia or
tritanopia (CIE 1976 distance 12 or more in Machado's simulation; tests/plots measures it all). What belongs together is
near: gradients are orange and the reduce-scatter that shards them a darker orange, gathered parameters are violet and
the all-gather that makes them a darker violet. Where a rank waits is red: solid for messages that nothing hides,
hatched for a rank that comes later. A rank off the CPU is hatched too, in amber.

And what every curve does: logarithmic axes with readable ticks, fewer points than there are steps.

A figure in a notebook does not know whether the page around it is light or dark (``on_any_page``). JupyterLab and VS
Code keep their ink in a variable, which plotly puts into words that are its markup; elsewhere they have the one grey
that reads on both. Numbers on axes and the names of a legend are no markup, and have that grey everywhere. (The hover
label has a ground of its own.)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from shardlab.records.tables import ProcessPart
from shardlab.vocabulary import Collective, MeshAxis, Role, SpanKind

BLUE = "#0072b2"
ORANGE = "#dd7710"
GREEN = "#15a072"
PINK = "#ce79a8"
VIOLET = "#8761fc"
SAND = "#aa8b48"
BROWN = "#90551a"
GREY = "#787b7a"
PALETTE = ("#325ad0", "#d45f36", "#52a55b", "#cd59a6", "#a768d9", "#b62e45", "#a5950f", "#147852")  # runs
RANKS = ("#ba8555", "#6f75b8", "#3e9573", "#7e5a89", "#6892b4", "#877d27", "#90564e", "#386f6d")
UNITS = ("#5f53c1", "#a73888", "#7f60af", "#d66399", "#6a94dc", "#bb6fb4", "#868af4", "#825f72")
ALL_RANKS = "#8f8693"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")

PAPER, TEXT = "#ffffff", "#1d2127"
INK = "#797979"  # lines: 4.3 to 1 on white and on a dark page, the most that one grey can have on both
GRID = "rgba(128,128,128,0.25)"
EXPOSED, WAITING, QUEUED, HIDDEN, REST = "#d32a28", "#e16a7b", "#83848b", "#769a9d", "#98928e"

# From the bottom of every stack up: what stays for the whole step lies below what comes and goes.
ROLE_COLOURS: dict[str, str] = {
    Role.PARAMETER: BLUE, Role.MASTER_WEIGHT: BROWN, Role.OPTIMIZER_STATE: GREEN, Role.OFFLOADED: "#b64169",
    Role.GRADIENT: ORANGE, Role.GATHERED_PARAMETER: VIOLET, Role.COMMUNICATION_BUFFER: PINK, Role.ACTIVATION: SAND,
    Role.OTHER: GREY, Role.UNATTRIBUTED: "#a77762", Role.WORKSPACE: "#8e5081",
}  # fmt: skip

PART_COLOURS: dict[str, str] = {
    ProcessPart.HEAP: "#75854e", ProcessPart.FREE_HEAP: "#968369", ProcessPart.INTERPRETER: "#7084b5",
    ProcessPart.LIBRARIES: "#578f89", ProcessPart.SHARED_SEGMENTS: "#a587a4",
}  # fmt: skip

COLLECTIVE_COLOURS: dict[str, str] = {
    Collective.ALL_REDUCE: "#0f8c93", Collective.REDUCE_SCATTER: "#ba5001", Collective.ALL_GATHER: "#7445e6",
    Collective.BROADCAST: "#748b2b", Collective.ALL_TO_ALL: "#b72da5", Collective.SEND: "#b2871d",
    Collective.RECV: "#79603b", Collective.REDUCE: "#b4547a", Collective.GATHER: "#4872dd",
    Collective.SCATTER: "#a6663b", Collective.BARRIER: "#5e7a7d", Collective.UNKNOWN: "#56668c",
}  # fmt: skip

AXIS_COLOURS: dict[str, str] = {
    MeshAxis.DATA: "#008043", MeshAxis.SHARD: "#9447bd", MeshAxis.REPLICA: "#4a91c4", MeshAxis.TENSOR: "#d16e32",
    MeshAxis.PIPE: "#c23a78", MeshAxis.CONTEXT: "#6a4fe0",
}  # fmt: skip

SPAN_COLOURS: dict[str, str] = {
    SpanKind.DATA: "#9e9647", SpanKind.FORWARD: "#8493a9", SpanKind.BACKWARD: "#556475", SpanKind.RECOMPUTE: "#a975c2",
    SpanKind.OPTIMIZER: "#46894a", SpanKind.OFF_CPU: "#c08505",
}  # fmt: skip

# By colour: what takes time and does nothing is hatched, so that it needs no colour to be told from what it is beside.
PATTERNS = {
    SPAN_COLOURS[SpanKind.OFF_CPU]: {"shape": "/", "fillmode": "replace", "size": 6, "solidity": 0.45},
    WAITING: {"shape": "\\", "fillmode": "replace", "size": 6, "solidity": 0.6},
}

STRATEGY_COLOURS = {
    "single": "#746878", "ddp": PALETTE[0], "bucketed": PALETTE[1], "zero1": PALETTE[2], "zero2": PALETTE[3],
    "zero3": PALETTE[4], "fsdp": PALETTE[5], "tensor_parallel": PALETTE[6],
    # torch's own engines have the colours of ours that they are compared with
    "torch_ddp": PALETTE[0], "torch_zero1": PALETTE[2], "torch_fsdp2": PALETTE[5], "torch_tp": PALETTE[6],
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
        "paper_bgcolor": PAPER,
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(PALETTE),
        "font": {"family": FONT, "size": 15, "color": TEXT},
        "title": {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
                  "pad": {"l": 12, "t": 14}, "font": {"size": 20}, "subtitle": {"font": {"size": 14}}},
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


def thinned(values: ArrayLike) -> NDArray[np.intp]:
    """Positions to draw, ascending: all of them, or the lowest and the highest of each of ``MAX_POINTS / 2`` stretches.

    Both ends and the highest point are always among them: the point that matters in a figure of memory.

    Args:
        values: the heights of the curve, in the order of drawing; finite.
    """
    heights = np.asarray(values, dtype=np.float64)
    if len(heights) <= MAX_POINTS:
        return np.arange(len(heights))
    edges = np.linspace(0, len(heights), MAX_POINTS // 2 + 1).astype(np.intp)
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


INK_OF_PAGE = f"var(--jp-content-font-color1,var(--vscode-editor-foreground,{INK}))"
CLEAR = "rgba(0,0,0,0)"
Json = dict[str, Any]


def on_any_page(content: Json) -> Json:
    """The figure without paper, in the ink of the page.

    Args:
        content: ``{"data": ..., "layout": ...}`` of Python's own types, which is left as it is.
    """
    layout: Json = {name: _inked_title(name, part) for name, part in content["layout"].items()}
    ground = {"paper_bgcolor": CLEAR, "font": {**layout.get("font", {}), "color": INK}}
    return {"data": [_inked_words(trace) for trace in content["data"]], "layout": layout | ground}


def _inked(text: str) -> str:
    return f'<span style="color:{INK_OF_PAGE}">{text}</span>'


def _inked_title(name: str, part: Any) -> Any:
    """A part of the layout: the title and its subtitle, the title of an axis, or notes."""
    if name == "annotations":
        return [note | _text(note) if "color" not in note.get("font", {}) else note for note in part]
    if name == "title":
        below = part.get("subtitle", {})
        return part | _text(part) | {"subtitle": below | _text(below)}
    if name.startswith(("xaxis", "yaxis")) and "title" in part:
        return part | {"title": part["title"] | _text(part["title"])}
    return part


def _text(part: Json) -> Json:
    return {"text": _inked(part["text"])} if part.get("text") else {}


def _inked_words(trace: Json) -> Json:
    """A trace; its words beside marks and behind bars get the ink of the page, those inside of bars have their own."""
    is_beside = "text" in trace.get("mode", "") or trace.get("textposition") == "outside"
    if not is_beside or "color" in trace.get("textfont", {}):
        return trace
    text = trace.get("text", [])
    return trace | {"text": _inked(text) if isinstance(text, str) else [_inked(one) if one else one for one in text]}
