"""One colour per role, collective, span kind and strategy, the same in every figure.

Eight hues near Okabe and Ito's, moved to middle lightness: each keeps a contrast of 2.9 or more against white AND
against JupyterLab's dark background (#111111), and any two differ for people with protanopia, deuteranopia or
tritanopia (CIE 1976 distance 12 or more in Machado's simulation; tests/plots measures both). What belongs together
shares a hue: gradients and the reduce-scatter that shards them are orange, gathered parameters and the all-gather that
makes them are violet.
"""

from collections.abc import Iterable

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
    Role.PARAMETER: BLUE,
    Role.GATHERED_PARAMETER: VIOLET,
    Role.GRADIENT: ORANGE,
    Role.OPTIMIZER_STATE: GREEN,
    Role.MASTER_WEIGHT: BROWN,
    Role.COMMUNICATION_BUFFER: PINK,
    Role.ACTIVATION: SAND,
    Role.OFFLOADED: WINE,
    Role.OTHER: GREY,
    Role.UNATTRIBUTED: "#a0705a",
    Role.WORKSPACE: "#805080",
}

PART_COLOURS: dict[str, str] = {
    ProcessPart.HEAP: "#7a8450",
    ProcessPart.FREE_HEAP: "#96826e",
    ProcessPart.INTERPRETER: "#6b7fae",
    ProcessPart.LIBRARIES: "#5f8a8b",
    ProcessPart.SHARED_SEGMENTS: "#9a7b9a",
}

COLLECTIVE_COLOURS: dict[str, str] = {
    Collective.ALL_REDUCE: BLUE,
    Collective.REDUCE_SCATTER: ORANGE,
    Collective.ALL_GATHER: VIOLET,
    Collective.BROADCAST: GREEN,
    Collective.ALL_TO_ALL: PINK,
    Collective.SEND: SAND,
    Collective.RECV: BROWN,
    Collective.REDUCE: WINE,
    Collective.GATHER: "#8904fb",
    Collective.SCATTER: "#a0705a",
    Collective.BARRIER: GREY,
    Collective.UNKNOWN: "#4c6088",
}

AXIS_COLOURS: dict[str, str] = {
    MeshAxis.DATA: BLUE,
    MeshAxis.SHARD: VIOLET,
    MeshAxis.REPLICA: GREEN,
    MeshAxis.TENSOR: ORANGE,
}

SPAN_COLOURS: dict[str, str] = {
    SpanKind.DATA: "#b08d57",
    SpanKind.FORWARD: "#8c96a6",
    SpanKind.BACKWARD: "#5b6678",
    SpanKind.RECOMPUTE: "#936aaf",
    SpanKind.OPTIMIZER: "#1f8a70",
    SpanKind.OFF_CPU: "#c33222",
}

STRATEGY_COLOURS = {
    "single": GREY,
    "ddp": BLUE,
    "bucketed": ORANGE,
    "zero1": GREEN,
    "zero2": PINK,
    "zero3": VIOLET,
    "fsdp": WINE,
    "tensor_parallel": SAND,
    # torch's own engines have the colours of ours that they are compared with
    "torch_ddp": BLUE,
    "torch_zero1": GREEN,
    "torch_fsdp2": WINE,
    "torch_tp": SAND,
}


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
