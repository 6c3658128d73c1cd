"""Which points of a long curve to draw: a screen has some thousand columns, and a figure must stay small."""

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_POINTS = 2000


def thinned(values: ArrayLike, limit: int = MAX_POINTS) -> NDArray[np.intp]:
    """Positions to draw, ascending: all, or of each of ``limit / 2`` stretches the lowest and the highest.

    The ends are always among them, and so is the highest point: what a picture of memory or loss is looked at for.

    Args:
        values: the curve's heights, in the order of drawing; finite.
        limit: about how many points may be drawn.
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
    """What a figure must say where it does not draw everything; empty where it does."""
    return f"{num_given:,} {what} drawn as {num_drawn:,}" if num_drawn < num_given else ""
