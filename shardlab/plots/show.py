"""Show a figure in a notebook: plotly's JSON for live viewers, a PNG for GitHub, text for everyone else.

The notebook holds no text/html, no plotly.js and no widget state. A PNG needs a browser, which takes about two seconds
to start, so it is made only if SHARDLAB_PNG=1, as in the command that builds the notebooks.
"""

import base64
import io
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import plotly.graph_objects as go

from shardlab.plots.theme import HEIGHT, summary_of

DIGITS = 6
PLOTLY_MIME = "application/vnd.plotly.v1+json"
PNG_WIDTH = 900
PNG_SCALE = 1.0  # with a palette about 12 kB a figure, so a notebook stays far below 500 kB
PNG_COLOURS = 256  # a figure has a few hundred, nearly all from the edges of letters


def plain_json(figure: go.Figure) -> dict[str, Any]:
    """``{"data": ..., "layout": ...}`` of Python's own types; NaN and infinity become None."""
    # Not figure.to_dict(): it turns arrays into base64.
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


def is_in_a_cell() -> bool:
    """Whether this runs in IPython, which has been imported then; scripts and the command line do without it."""
    if sys.modules.get("IPython") is None:
        return False
    from IPython.core.getipython import get_ipython

    return get_ipython() is not None


def show(figure: go.Figure) -> None:
    """Display ``figure`` in the current cell; outside a notebook, print its summary."""
    if not is_in_a_cell():
        sys.stdout.write(summary_of(figure) + "\n")
        return
    from IPython.display import display

    display(mime_bundle(figure), raw=True)  # type: ignore[no-untyped-call]  # IPython leaves it untyped


def mime_bundle(figure: go.Figure, *, with_png: bool = True) -> dict[str, Any]:
    """The output of a cell: plotly JSON, a text summary, and a PNG if one is wanted and a browser is available."""
    content = plain_json(figure)
    # Not "responsive": JupyterLab fits the width itself, and with both a figure loses its height on a resize.
    config = {"displaylogo": False}
    bundle: dict[str, Any] = {PLOTLY_MIME: content | {"config": config}, "text/plain": summary_of(figure)}
    image = png(figure) if with_png and os.environ.get("SHARDLAB_PNG") == "1" else None
    return bundle if image is None else bundle | {"image/png": base64.b64encode(image).decode("ascii")}


def png(figure: go.Figure) -> bytes | None:
    """The figure as a PNG with a transparent background; None if kaleido or Chrome or Chromium is missing."""
    try:
        from kaleido import calc_fig_sync
        from kaleido.errors import ChromeNotFoundError
    except ImportError:
        return None
    options = {"format": "png", "width": PNG_WIDTH, "height": figure.layout.height or HEIGHT, "scale": PNG_SCALE}
    try:
        with _without_noise():
            image: bytes = calc_fig_sync(plain_json(figure), opts=options)
    except ChromeNotFoundError:
        return None
    return _with_few_colours(image)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Silence kaleido's pipe: now and then it logs a harmless traceback, which a notebook must not show."""
    logger = logging.getLogger("choreographer.channels.pipe")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _with_few_colours(image: bytes) -> bytes:
    """The PNG with a palette: a quarter of the size, and it looks the same. Unchanged if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        return image
    few = Image.open(io.BytesIO(image)).quantize(PNG_COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(smaller := io.BytesIO(), "PNG", optimize=True)
    return smaller.getvalue()
