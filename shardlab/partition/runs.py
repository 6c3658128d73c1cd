"""Contiguous runs: a sequence of sizes cut into one run per rank so that the largest load is as small as it can be.

Two steps. The smallest possible largest load is found by bisection over integers: a greedy fill from the left tells
whether a limit can be kept. Then the runs are drawn near the mean, never past that limit, so that the smaller loads are
even too.
"""

from collections.abc import Sequence

from shardlab.partition.chunks import require_count


def balanced_runs(sizes: Sequence[int], num_runs: int, base: Sequence[int] | None = None) -> tuple[int, ...]:
    """Offsets of ``num_runs`` contiguous runs of ``sizes`` that minimise the largest load.

    Args:
        sizes: size of each item, 0 or more, in an order that is kept.
        num_runs: runs, 1 or more; some are empty where there are fewer items.
        base: load that each run has before it gets an item; none by default.

    Returns:
        ``num_runs + 1`` offsets into ``sizes``: first 0, last ``len(sizes)``.

    Raises:
        ValueError: ``num_runs`` is below 1, a size is negative, or ``base`` has another length than ``num_runs``.
    """
    require_count("num_runs", num_runs, 1)
    require_count("sizes", min(sizes, default=0), 0)
    base = [0] * num_runs if base is None else list(base)
    if len(base) != num_runs:
        raise ValueError(f"base must have one load per run: {num_runs} runs, {len(base)} loads")
    return _draw_runs(sizes, base, _smallest_limit(sizes, base))


def _smallest_limit(sizes: Sequence[int], base: Sequence[int]) -> int:
    low, high = max(base), max(base) + sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _fits(sizes, 0, base, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sizes: Sequence[int], first: int, base: Sequence[int], limit: int) -> bool:
    """Whether the items from ``first`` on fit the runs of ``base``: each run takes as many as it can."""
    for load in base:
        while first < len(sizes) and load + sizes[first] <= limit:
            load += sizes[first]
            first += 1
    return first == len(sizes)


def _draw_runs(sizes: Sequence[int], base: Sequence[int], limit: int) -> tuple[int, ...]:
    bounds = [0]
    item = 0
    for run, load in enumerate(base):
        rest = base[run + 1 :]
        mean = (sum(base[run:]) + sum(sizes[item:])) / (len(base) - run)
        while item < len(sizes) and load + sizes[item] <= limit:
            enough = load + sizes[item] / 2 > mean or (item > bounds[-1] and len(sizes) - item <= len(rest))
            if enough and _fits(sizes, item, rest, limit):
                break
            load += sizes[item]
            item += 1
        bounds.append(item)
    return tuple(bounds)
