"""Nested intervals flattened: at each moment the one that began last, which is the innermost."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardlab.analysis.intervals import Intervals, as_intervals, merge


def innermost(times: ArrayLike, holes: ArrayLike = ()) -> tuple[Intervals, NDArray[np.intp]]:
    """Disjoint, sorted pieces of the union of ``times`` outside of ``holes``, and whose each is.

    Args:
        times: intervals, nested or not.
        holes: intervals that belong to none of them.

    Returns:
        Pieces of shape (number, 2), and for each the index in ``times`` of the interval that began last; of several
        that began together, the shortest.
    """
    spans, gaps = as_intervals(times), merge(holes)
    cuts = np.unique(np.concatenate((spans.ravel(), gaps.ravel())))
    owners = _owners(spans, cuts)
    pieces = np.column_stack((cuts[:-1], cuts[1:]))
    kept = (owners >= 0) & ~_inside(pieces, gaps)
    pieces, owners = pieces[kept], owners[kept]
    if not len(pieces):
        return pieces, owners
    begins = np.concatenate(([True], (owners[1:] != owners[:-1]) | (pieces[1:, 0] != pieces[:-1, 1])))
    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(pieces) - 1)
    return np.column_stack((pieces[begins, 0], pieces[ends, 1])), owners[begins]


def _owners(spans: Intervals, cuts: NDArray[np.float64]) -> NDArray[np.intp]:
    """The innermost interval between each two cuts; -1 where there is none."""
    owners = np.full(max(len(cuts) - 1, 0), -1, dtype=np.intp)
    order = np.argsort(spans[:, 0], kind="stable").tolist()
    bounds, place = spans.tolist(), 0
    active: list[tuple[float, float, int]] = []  # the one that began last on top, then the one that ends first
    for piece, begin in enumerate(cuts[:-1].tolist()):
        while place < len(order) and bounds[order[place]][0] <= begin:
            start, end = bounds[order[place]]
            heappush(active, (-start, end, order[place]))
            place += 1
        while active and active[0][1] <= begin:
            heappop(active)
        if active:
            owners[piece] = active[0][2]
    return owners


def _inside(pieces: Intervals, gaps: Intervals) -> NDArray[np.bool_]:
    if not len(gaps):
        return np.zeros(len(pieces), dtype=np.bool_)
    before = np.searchsorted(gaps[:, 0], pieces[:, 0], side="right") - 1
    inside: NDArray[np.bool_] = (before >= 0) & (pieces[:, 0] < gaps[before, 1])
    return inside
