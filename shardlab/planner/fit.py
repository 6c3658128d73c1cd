"""Does a run fit a GPU: what a step gathers besides what it holds at rest, what memory is left, how long it sends.

    left = memory of the GPU - at rest - gathered at once
    rows that fit = left / bytes that autograd keeps for a row

Gathered at once, in elements of the type that gathers carry, on top of this rank's shards:

============================  ===============================================================
single to zero2               0: parameters are whole, and count as at rest
zero3                         P, and at the end of backward P whole gradients, which are not counted
fsdp                          root + the largest (1 + prefetch) units that follow each other
fsdp shard_grad_op, no_shard  P: nothing is resharded between forward and backward
============================  ===============================================================

Parameters that a rank holds whole (no_shard, a single rank, ``replicate_below``) count as 0 there where it computes
with the very tensors that it holds at rest. In another type, or offloaded, they are copied, and the copies count.

What is left is for activations, for gradients that are being reduced, and for temporaries. A GPU's own libraries and
its allocator take some of it too, which no plan knows. So a plan that leaves little is no promise that a run fits; one
that leaves nothing promises that it does not, because it counts only what must be there.
"""

from collections.abc import Mapping
from math import floor

import pandas as pd

from shardlab.partition.ring_cost import Link


def sending_us(collectives: pd.DataFrame, link: Link) -> float:
    """Microseconds that the messages of a step take one after another on ``link``, of the rank that sends longest.

    Args:
        collectives: table ``collectives``, predicted or recorded, of one step.
        link: between any two ranks.
    """
    times = [
        link.ring_time_us(op, num_bytes, size)
        for op, num_bytes, size in collectives[["op", "bytes", "group_size"]].itertuples(index=False, name=None)
    ]
    by_rank = collectives.assign(time_us=times).groupby("rank")["time_us"].sum()
    return float(by_rank.max()) if len(by_rank) else 0.0


def rows_that_fit(left_bytes: float, kept: Mapping[int, int]) -> int:
    """How many rows a rank may take in a micro-batch: a line through what autograd keeps for two numbers of rows.

    Args:
        left_bytes: of the GPU's memory.
        kept: bytes kept for backward, by number of rows; two different numbers.

    Raises:
        ValueError: there are not two numbers of rows, or more rows keep no more bytes.
    """
    if len(kept) != 2:
        raise ValueError(f"kept: {len(kept)} numbers of rows were given; give bytes for two")
    (fewer, less), (several, more) = sorted(kept.items())
    per_row = (more - less) / (several - fewer)
    if per_row <= 0:
        raise ValueError(f"kept: {several} rows keep {more} bytes, no more than {fewer} rows with {less}")
    return max(0, floor((left_bytes - less) / per_row + fewer))
