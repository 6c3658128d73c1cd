"""Sets of half-open intervals ``[start, end)`` as arrays of shape (number, 2): union, intersection, difference, length.

Every function takes intervals in any order, overlapping or not, and returns them merged: sorted, disjoint, none empty.
The unit of time is the caller's.
"""

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
        raise ValueError(f"interval {row} is [{array[row, 0]}, {array[row, 1]}): bounds must be finite, start <= end")
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
    """What lies in both."""
    one, other = merge(first), merge(second)
    pieces = _pieces(one, other)
    return merge(pieces[_covered(pieces, one) & _covered(pieces, other)])


def subtract(first: ArrayLike, second: ArrayLike) -> Intervals:
    """What lies in ``first`` and not in ``second``."""
    one, other = merge(first), merge(second)
    pieces = _pieces(one, other)
    return merge(pieces[_covered(pieces, one) & ~_covered(pieces, other)])


def total(intervals: ArrayLike) -> float:
    """Length of the union: what overlaps counts once."""
    merged = merge(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


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
