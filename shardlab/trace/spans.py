"""Intervals of one step in plain Python: what a span computed while it did not wait, and what stayed exposed.

``analysis.intervals`` says the same for whole tables with numpy. A step has a few dozen intervals, and a run thousands
of steps that are worked on one by one: numpy's fixed cost of ten microseconds a call would be most of reading one.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import nan

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as sorted, disjoint intervals; empty ones are dropped."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def without(span: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """What is left of ``span`` outside of ``holes``, which are merged."""
    start, end = span
    if not holes or end <= holes[0][0] or start >= holes[-1][1]:  # most spans of a step
        return [span] if end > start else []
    pieces = []
    place = max(bisect_right(holes, start, key=lambda hole: hole[0]) - 1, 0)
    for hole_start, hole_end in holes[place:]:
        if hole_start >= end:
            break
        if hole_start > start:
            pieces.append((start, hole_start))
        start = max(start, hole_end)
    if end > start:
        pieces.append((start, end))
    return pieces


def shared(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Length of what lies in both; both are merged."""
    length, place = 0.0, 0
    for start, end in one:
        while place < len(other) and other[place][1] <= start:
            place += 1
        for other_start, other_end in other[place:]:
            if other_start >= end:
                break
            length += min(end, other_end) - max(start, other_start)
    return length


def exposure(communication: Iterable[Interval], compute: Iterable[Interval]) -> tuple[float, float]:
    """(exposed time, overlap) of one step, as in ``analysis.overlap``; NaN where nothing was communicated."""
    union = merged(communication)
    length = sum(end - start for start, end in union)
    if length == 0:
        return nan, nan
    hidden = shared(union, merged(compute))
    return length - hidden, hidden / length
