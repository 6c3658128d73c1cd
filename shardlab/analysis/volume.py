"""Volume and bandwidth: how many bytes each rank sent, and how fast each collective was.

Bandwidths follow nccl-tests. With S the bytes of the whole buffer, t the time from start to end and N the group size:

    algorithm bandwidth = S / t
    bus bandwidth       = S / t x 2(N-1)/N for all-reduce, x (N-1)/N for reduce-scatter, all-gather and all-to-all,
                          x 1 for broadcast, send and receive

The bus bandwidth can be held against the speed of the link whatever N is. Units are decimal: 1 GB/s = 1e9 bytes/s.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.analysis.rows import KEYS, bounds, numbers
from shardlab.tables import COLLECTIVES
from shardlab.vocabulary import Collective

HALF_OF_ALL_REDUCE = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)


def wire_bytes(collectives: pd.DataFrame, by: Sequence[str] = ("op",)) -> pd.DataFrame:
    """Bytes sent by each rank in each step, split by further columns such as ``op``, ``tag``, ``axis`` or ``phase``.

    Args:
        collectives: table ``collectives``.
        by: columns to split by; empty for one row per rank and step.

    Returns:
        One row per (run, source, rank, step, *by): ``wire_bytes`` (sent by this rank), ``bytes`` (of the whole
        buffers), ``num_collectives``.

    Raises:
        ValueError: a column is missing, or ``by`` names one that the table has not.
    """
    COLLECTIVES.check(collectives)
    unknown = [name for name in by if name not in COLLECTIVES.column_names]
    if unknown:
        raise ValueError(f"by: no columns {unknown} in table 'collectives'; it has {COLLECTIVES.column_names}")
    groups = collectives.groupby([*KEYS, *by], sort=True)
    return groups.agg(
        wire_bytes=("wire_bytes", "sum"), bytes=("bytes", "sum"), num_collectives=("seq", "size")
    ).reset_index()


def bandwidth(collectives: pd.DataFrame) -> pd.DataFrame:
    """Time and bandwidth of every collective.

    Returns:
        The keys, ``seq``, ``op``, ``tag``, ``bytes``, ``group_size``, and ``duration_us``, ``algorithm_gb_per_s``,
        ``bus_gb_per_s``; NaN where nothing was moved or no time passed.

    Raises:
        ValueError: a column or a time is missing, or a collective ends before it begins.
    """
    COLLECTIVES.check(collectives)
    times = bounds(collectives, "start_us", "end_us", "collectives")
    table = collectives[[*KEYS, "seq", "op", "tag", "bytes", "group_size"]].copy()
    duration_us, num_bytes = times[:, 1] - times[:, 0], numbers(collectives, "bytes")
    known = (duration_us > 0) & (num_bytes > 0)
    algorithm = np.full(len(table), np.nan)
    np.divide(num_bytes, duration_us * 1e3, out=algorithm, where=known)
    table["duration_us"] = duration_us
    table["algorithm_gb_per_s"] = algorithm
    table["bus_gb_per_s"] = algorithm * _bus_factor(collectives)
    return table


def _bus_factor(collectives: pd.DataFrame) -> NDArray[np.float64]:
    """Bytes each link carries for each byte of the buffer, row by row."""
    size = numbers(collectives, "group_size")
    share = (size - 1) / size
    op = collectives["op"].to_numpy(dtype=object)
    half = np.isin(op, [str(verb) for verb in HALF_OF_ALL_REDUCE])
    return np.where(op == str(Collective.ALL_REDUCE), 2 * share, np.where(half, share, 1.0))
