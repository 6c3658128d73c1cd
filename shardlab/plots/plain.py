"""A figure as plain JSON: lists instead of binary arrays, six significant digits, nothing that is not drawn.

Rounded lists are smaller than plotly's base64 of float64, and viewers with an older plotly.js (before 2.35) read them.
"""

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

DIGITS = 6


def plain_json(figure: go.Figure) -> dict[str, Any]:
    """``{"data": ..., "layout": ...}`` of Python's own types; NaN and infinity become None."""
    # figure.to_dict() would already have turned arrays into base64
    traces = [trace.to_plotly_json() for trace in figure.data]
    return {"data": _plain(traces), "layout": _plain(figure.layout.to_plotly_json())}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return _rounded(value) if isinstance(value, float) else value


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS - 1}e}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
