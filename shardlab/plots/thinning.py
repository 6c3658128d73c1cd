"""Drawing less than there is: points of a long curve, bars of a timeline, levels of nested spans.

A span of the whole model contains those of its blocks, which contain those of their layers. The level drawn is the
outermost at which there are at least two units: the blocks. Surrounding spans stay visible as a pale background, so
that time in the model but in no unit shows too.
"""

from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from shardlab.vocabulary import WHOLE_MODEL

MAX_POINTS = 2000
MAX_BARS = 1000


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


def drawn_levels(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans to draw, with a column ``ground``: True for spans that only surround the level that is drawn.

    Args:
        spans: rows of table ``spans`` of one step; the level is chosen for each kind, over all ranks.
    """
    kept = []
    for _, kind_rows in spans.groupby("kind", sort=False):
        parts = [_with_depth(rows) for _, rows in kind_rows.groupby("rank", sort=False)]
        rows = pd.concat(parts)
        level = _level(rows)
        solid = (rows["depth"] == level) | ((rows["depth"] < level) & rows["leaf"])
        kept.append(rows[rows["depth"] <= level].assign(ground=~solid[rows["depth"] <= level]))
    return pd.concat(kept) if kept else spans.assign(depth=0, leaf=True, ground=False)


def bar_groups(start: NDArray[np.float64], end: NDArray[np.float64], window: float) -> NDArray[np.intp]:
    """The group of each bar: beyond MAX_BARS bars, those narrower than a column of the screen share one per column.

    Args:
        start: beginning of each bar.
        end: end of each bar.
        window: width of the whole figure, in the same unit.
    """
    own = np.arange(len(start))
    if len(start) <= MAX_BARS or window <= 0:
        return own
    column = np.floor(start / (window / MAX_BARS)).astype(np.intp)
    short = (end - start) < window / MAX_BARS
    keys = np.where(short, -1 - column + column.min(), own)
    return np.unique(keys, return_inverse=True)[1].astype(np.intp)


def _with_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """One rank's spans of one kind with ``depth`` (number of surrounding spans) and ``leaf`` (contains no span)."""
    # If two spans begin and end together, the whole model surrounds a unit, and a unit surrounds its parts.
    parts = rows["unit"].astype(str).where(rows["unit"] != WHOLE_MODEL, "")
    rows = rows.assign(depth=parts.str.count(r"\.") + (parts != ""))
    rows = rows.sort_values(["start_us", "end_us", "depth"], ascending=[True, False, True], kind="stable")
    ends = rows["end_us"].to_numpy(dtype=np.float64)
    depth = np.zeros(len(rows), dtype=np.intp)
    around: list[float] = []
    for index, (start, end) in enumerate(zip(rows["start_us"].to_numpy(dtype=np.float64), ends, strict=True)):
        while around and (around[-1] <= start or around[-1] < end):
            around.pop()
        depth[index] = len(around)
        around.append(end)
    leaf = np.append(depth[1:] <= depth[:-1], True) if len(rows) else np.zeros(0, dtype=np.bool_)
    return rows.assign(depth=depth, leaf=leaf)


def _level(rows: pd.DataFrame) -> int:
    """The outermost depth with two or more units; 0 if every depth has only one."""
    units = rows.groupby("depth")["unit"].nunique()
    wide = units[units >= 2]
    return int(wide.index.min()) if len(wide) else 0
