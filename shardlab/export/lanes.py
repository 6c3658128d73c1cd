"""Threads for intervals that may overlap without nesting, which slices of one thread must not."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from shardlab.analysis.intervals import Intervals


def lanes(times: Intervals) -> NDArray[np.intp]:
    """The first lane that is free at each interval's start; intervals of a lane are disjoint."""
    found = np.zeros(len(times), dtype=np.intp)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for row in np.lexsort((times[:, 1], times[:, 0])):
        start, end = times[row].tolist()
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        found[row] = lane
        heappush(busy, (end, lane))
    return found
