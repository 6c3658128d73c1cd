"""Sets of half-open intervals ``[start, end)``: union, intersection, difference, length; nested and concurrent ones.

Arguments are arrays of shape (number, 2), in any order, overlapping or not. Results are merged: sorted, disjoint, none
empty. The unit of time is up to the caller.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

Intervals = NDArray[np.float64]


def as_intervals(intervals: ArrayLike) -> Intervals:
    """The argument as a float64 array of shape (number, 2).

    Raises:
        ValueError: a bound is not a finite number, or an interval ends before it begins; the message names the row.
    """
    array = np.asarray(intervals, dtype=np.float64).reshape(-1, 2)
    wrong = ~np.isfinite(array).all(axis=1) | (array[:, 1] < array[:, 0])
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"interval {row}: [{array[row, 0]}, {array[row, 1]}); bounds must be finite, and start <= end")
    return array


def merge(intervals: ArrayLike) -> Intervals:
    """The union as disjoint intervals; those that touch become one."""
    array = as_intervals(intervals)
    array = array[array[:, 1] > array[:, 0]]
    if not len(array):
        return array
    array = array[np.argsort(array[:, 0], kind="stable")]
    reached = np.maximum.accumulate(array[:, 1])
    begins = np.concatenate(([True], array[1:, 0] > reached[:-1]))
    last = np.append(np.flatnonzero(begins)[1:] - 1, len(array) - 1)
    return np.column_stack((array[begins, 0], reached[last]))


def intersect(first: ArrayLike, second: ArrayLike) -> Intervals:
    """The part that lies in both."""
    one, other = merge(first), merge(second)
    pieces = _pieces(one, other)
    return merge(pieces[_covered(pieces, one) & _covered(pieces, other)])


def subtract(first: ArrayLike, second: ArrayLike) -> Intervals:
    """The part of ``first`` that does not lie in ``second``."""
    one, other = merge(first), merge(second)
    pieces = _pieces(one, other)
    return merge(pieces[_covered(pieces, one) & ~_covered(pieces, other)])


def total(intervals: ArrayLike) -> float:
    """Length of the union: overlapping parts count once."""
    merged = merge(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


def covered_until(intervals: ArrayLike, moments: ArrayLike) -> NDArray[np.float64]:
    """How much of the union lies before each moment; shape of ``moments``."""
    merged = merge(intervals)
    if not len(merged):
        return np.zeros(np.shape(moments))
    lengths = np.diff(merged, axis=1).ravel()
    sums = np.column_stack((np.cumsum(lengths) - lengths, np.cumsum(lengths)))
    return np.asarray(np.interp(np.asarray(moments, dtype=np.float64), merged.ravel(), sums.ravel()))


def _pieces(one: Intervals, other: Intervals) -> Intervals:
    """The axis cut at every bound: within a piece, membership in either set does not change."""
    cuts = np.unique(np.concatenate((one.ravel(), other.ravel())))
    return np.column_stack((cuts[:-1], cuts[1:]))


def _covered(pieces: Intervals, merged: Intervals) -> NDArray[np.bool_]:
    """Which pieces lie inside one of the disjoint, sorted intervals."""
    if not len(merged):
        return np.zeros(len(pieces), dtype=np.bool_)
    before = np.searchsorted(merged[:, 0], pieces[:, 0], side="right") - 1
    inside: NDArray[np.bool_] = (before >= 0) & (pieces[:, 0] < merged[before, 1])
    return inside


def innermost(times: ArrayLike, holes: ArrayLike = ()) -> tuple[Intervals, NDArray[np.intp]]:
    """Cut the union of ``times`` outside ``holes`` into disjoint, sorted pieces, each owned by its innermost interval.

    Args:
        times: intervals, nested or not.
        holes: intervals to leave out.

    Returns:
        Pieces of shape (number, 2), and for each the index in ``times`` of its owner: the interval that began last, and
        of several that began together the shortest.
    """
    spans, gaps = as_intervals(times), merge(holes)
    pieces = _pieces(spans, gaps)
    owners = _owners(spans, pieces)
    kept = (owners >= 0) & ~_covered(pieces, gaps)
    pieces, owners = pieces[kept], owners[kept]
    if not len(pieces):
        return pieces, owners
    begins = np.concatenate(([True], (owners[1:] != owners[:-1]) | (pieces[1:, 0] != pieces[:-1, 1])))
    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(pieces) - 1)
    return np.column_stack((pieces[begins, 0], pieces[ends, 1])), owners[begins]


def _owners(spans: Intervals, pieces: Intervals) -> NDArray[np.intp]:
    """The innermost interval around each piece; -1 if there is none."""
    owners = np.full(len(pieces), -1, dtype=np.intp)
    order = np.argsort(spans[:, 0], kind="stable").tolist()
    bounds, place = spans.tolist(), 0
    # A heap: the one that began last on top; of several, the one that ends first.
    active: list[tuple[float, float, int]] = []
    for piece, begin in enumerate(pieces[:, 0].tolist()):
        while place < len(order) and bounds[order[place]][0] <= begin:
            start, end = bounds[order[place]]
            heappush(active, (-start, end, order[place]))
            place += 1
        while active and active[0][1] <= begin:
            heappop(active)
        if active:
            owners[piece] = active[0][2]
    return owners


def concurrent_rows(times: ArrayLike, most: int | None = None) -> NDArray[np.intp]:
    """The first row that is free when each interval starts, so that no two of a row overlap.

    Args:
        times: intervals.
        most: number of rows; what finds none free shares the last.
    """
    spans = as_intervals(times)
    rows, free_from = np.zeros(len(spans), dtype=np.intp), list[float]()
    for index in np.argsort(spans[:, 0], kind="stable"):
        start, end = spans[index].tolist()
        row = next((row for row, free in enumerate(free_from) if free <= start), len(free_from))
        if row == len(free_from) and row != most:
            free_from.append(end)
        rows[index] = row = min(row, len(free_from) - 1)
        free_from[row] = max(free_from[row], end)
    return rows
