"""Whole-parameter ownership: every parameter belongs to exactly one rank, which keeps its optimizer state and steps it.

Sharded: whatever the owner keeps. Optimizers that look at a whole tensor (Adafactor, LAMB, Muon) stay exact under it.
The price is balance: bytes are as even as parameter sizes allow.

- round robin: parameter i belongs to rank i mod N; the simplest, blind to sizes.
- contiguous: runs of neighbours, the largest run as small as it can be; neighbours are used together.
- balanced: largest first, each to the rank with the fewest bytes so far, at most 4/3 - 1/(3N) times the best possible
  largest load (Graham, "Bounds on multiprocessing timing anomalies", 1969).

Every choice depends on order and bytes only, so all ranks agree without a message.
"""

from bisect import bisect_left
from collections.abc import Sequence

from shardlab.partition.chunks import ParamSpec, require_count
from shardlab.vocabulary import Partition


def assign_owners(specs: Sequence[ParamSpec], num_ranks: int, partition: Partition) -> tuple[int, ...]:
    """Owning rank of each parameter, in the order of ``specs``.

    Args:
        specs: the parameters; bytes decide, not elements.
        num_ranks: ranks, 1 or more; some own nothing where there are fewer parameters.
        partition: ``round_robin``, ``contiguous`` or ``balanced``.

    Raises:
        ValueError: ``num_ranks`` is below 1, or ``partition`` is not one of the three.
    """
    require_count("num_ranks", num_ranks, 1)
    num_bytes = [spec.num_bytes for spec in specs]
    if partition == Partition.ROUND_ROBIN:
        return tuple(index % num_ranks for index in range(len(specs)))
    if partition == Partition.CONTIGUOUS:
        bounds = _balanced_runs(num_bytes, num_ranks)
        return tuple(rank for rank in range(num_ranks) for _ in range(bounds[rank], bounds[rank + 1]))
    if partition == Partition.BALANCED:
        return _largest_first(num_bytes, num_ranks)
    whole = ", ".join([Partition.ROUND_ROBIN, Partition.CONTIGUOUS, Partition.BALANCED])
    raise ValueError(f"partition: {str(partition)!r} gives no rank whole parameters; it must be one of {whole}")


def owners_by_name(specs: Sequence[ParamSpec], num_ranks: int, partition: Partition) -> dict[str, int]:
    """The owning rank of each parameter, see ``assign_owners``."""
    return dict(zip((spec.name for spec in specs), assign_owners(specs, num_ranks, partition), strict=True))


def _largest_first(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Rank of each item: largest item first, each to the least loaded rank; ties go to the lower index and rank."""
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    # A stable sort, and min() takes the first: ties fall alike on all ranks, which do not ask each other.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(num_ranks), key=loads.__getitem__)
        owners[index] = rank
        loads[rank] += sizes[index]
    return tuple(owners)


def _balanced_runs(sizes: Sequence[int], num_runs: int) -> tuple[int, ...]:
    """Offsets of ``num_runs`` contiguous runs of ``sizes`` that minimise the largest load.

    Two steps. The smallest possible largest load is found by bisection over integers: a greedy fill from the left tells
    whether a limit can be kept. (One run can take all, so the sum need not be tried.) Then the runs are drawn near the
    mean, never past that limit, so that the smaller loads are even too.

    Args:
        sizes: size of each item, 0 or more, in an order that is kept.
        num_runs: runs, 1 or more; some are empty where there are fewer items.

    Returns:
        ``num_runs + 1`` offsets into ``sizes``: first 0, last ``len(sizes)``.
    """
    limit = bisect_left(range(sum(sizes)), True, key=lambda limit: _fits(sizes, num_runs, limit))
    bounds = [0]
    item = 0
    for later_runs in reversed(range(num_runs)):
        load, mean = 0, sum(sizes[item:]) / (later_runs + 1)
        while item < len(sizes) and load + sizes[item] <= limit:
            # Or when each later run would otherwise lack an item of its own.
            enough = load + sizes[item] / 2 > mean or len(sizes) - item <= later_runs
            # It may stop early, with an item of its own, only if the later runs can take the rest.
            if enough and item > bounds[-1] and _fits(sizes[item:], later_runs, limit):
                break
            load += sizes[item]
            item += 1
        bounds.append(item)
    return tuple(bounds)


def _fits(sizes: Sequence[int], num_runs: int, limit: int) -> bool:
    """Whether the items fit the runs: each run takes as many as it can."""
    first = 0
    for _ in range(num_runs):
        load = 0
        while first < len(sizes) and load + sizes[first] <= limit:
            load += sizes[first]
            first += 1
    return first == len(sizes)
