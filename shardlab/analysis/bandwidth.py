"""Bytes sent, bandwidth of each collective, and the latency-bandwidth model of a message.

Bandwidths follow nccl-tests. With S the bytes of the whole buffer, t the time from start to end and N the group size:

    algorithm bandwidth = S / t
    bus bandwidth       = S / t x 2(N-1)/N for all-reduce, x (N-1)/N for reduce-scatter, all-gather, all-to-all,
                          gather and scatter, x 1 for broadcast, reduce, send and receive

The bus bandwidth can be compared with the speed of the link whatever N is. Units are decimal: 1 GB/s = 1e9 bytes/s.

The model is time = latency + bytes / bandwidth (Hockney 1994: startup time and r_inf). The fit minimises the RELATIVE
error, so that a message of 1 kB counts as much as one of 100 MB, and keeps both coefficients at or above zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from shardlab.analysis.rows import KEYS, bounds, numbers, require_columns
from shardlab.records.tables import COLLECTIVES
from shardlab.vocabulary import Collective

HALF_OF_ALL_REDUCE = (
    Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER,
)  # fmt: skip
MESSAGE_COLUMNS = ("op", "bytes", "time_us")


def wire_bytes(collectives: pd.DataFrame, by: Sequence[str] = ("op",)) -> pd.DataFrame:
    """Bytes sent by each rank in each step, split by further columns such as ``op``, ``tag``, ``axis`` or ``phase``.

    Args:
        collectives: table ``collectives``.
        by: columns to split by; empty for one row per rank and step.

    Returns:
        One row per (run, source, rank, step, *by): ``wire_bytes`` (sent by this rank), ``bytes`` (of the whole
        buffers), ``num_collectives``.

    Raises:
        ValueError: a column is missing.
    """
    COLLECTIVES.check(collectives)
    groups = collectives.groupby([*KEYS, *by], sort=True)
    sums = groups.agg(wire_bytes=("wire_bytes", "sum"), bytes=("bytes", "sum"), num_collectives=("seq", "size"))
    return sums.reset_index()


def bandwidth(collectives: pd.DataFrame) -> pd.DataFrame:
    """Time and bandwidth of every collective.

    Returns:
        The keys, ``seq``, ``op``, ``tag``, ``bytes``, ``group_size``, and ``duration_us``, ``algorithm_gb_per_s``,
        ``bus_gb_per_s``; NaN if nothing was moved or no time passed.

    Raises:
        ValueError: a column or a time is missing, or a collective ends before it begins.
    """
    COLLECTIVES.check(collectives)
    times = bounds(collectives, "start_us", "end_us", "collectives")
    table = collectives[[*KEYS, "seq", "op", "tag", "bytes", "group_size"]]
    duration_us, num_bytes = times[:, 1] - times[:, 0], numbers(collectives, "bytes")
    algorithm = np.full(len(table), np.nan)
    np.divide(num_bytes, duration_us * 1e3, out=algorithm, where=(duration_us > 0) & (num_bytes > 0))
    bus = algorithm * _bus_factor(collectives)
    return table.assign(duration_us=duration_us, algorithm_gb_per_s=algorithm, bus_gb_per_s=bus)


def _bus_factor(collectives: pd.DataFrame) -> NDArray[np.float64]:
    """Bytes that each link carries per byte of the buffer, row by row."""
    size = numbers(collectives, "group_size")
    share = (size - 1) / size
    op = collectives["op"].to_numpy(dtype=object)
    half = np.isin(op, [str(verb) for verb in HALF_OF_ALL_REDUCE])
    return np.where(op == str(Collective.ALL_REDUCE), 2 * share, np.where(half, share, 1.0))


@dataclass(frozen=True)
class LatencyBandwidth:
    """A line through message times: ``latency_us`` in microseconds, ``bandwidth_gb_per_s`` in 1e9 BYTES per second.

    The bandwidth is infinite if the time did not grow with the size.
    """

    latency_us: float
    bandwidth_gb_per_s: float

    def time_us(self, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Time of messages of ``num_bytes`` according to the model, in microseconds."""
        return self.latency_us + np.asarray(num_bytes, dtype=np.float64) / (self.bandwidth_gb_per_s * 1e3)


def fit_latency_bandwidth(num_bytes: ArrayLike, time_us: ArrayLike) -> LatencyBandwidth:
    """Fit the latency-bandwidth model to measured messages.

    Args:
        num_bytes: sizes, at least two different ones.
        time_us: times in microseconds, all above zero.

    Raises:
        ValueError: fewer than two sizes, lengths that differ, or a time that is not above zero.
    """
    size, time = np.asarray(num_bytes, dtype=np.float64), np.asarray(time_us, dtype=np.float64)
    if size.shape != time.shape or len(np.unique(size)) < 2:
        raise ValueError(
            f"num_bytes, time_us: need equal lengths and at least two sizes, got shapes {size.shape} and {time.shape}"
        )
    if not (np.isfinite(time) & (time > 0)).all() or not (np.isfinite(size) & (size >= 0)).all():
        raise ValueError("time_us, num_bytes: times must be above 0 and sizes at least 0, without missing values")
    latency_us, us_per_byte = _non_negative_line(size / time, 1 / time)
    return LatencyBandwidth(latency_us, 1e-3 / us_per_byte if us_per_byte > 0 else float("inf"))


def with_fit(messages: pd.DataFrame) -> pd.DataFrame:
    """``messages`` (columns op, bytes, time_us, ...) with ``fitted_us``: one fit for each op.

    Raises:
        ValueError: a column is missing, or an op has fewer than two sizes.
    """
    require_columns(messages, MESSAGE_COLUMNS, "messages")
    fitted = messages.assign(fitted_us=np.nan)
    for op in messages["op"].unique():
        rows = messages["op"] == op
        size = messages.loc[rows, "bytes"].to_numpy(dtype=np.float64)
        line = fit_latency_bandwidth(size, messages.loc[rows, "time_us"].to_numpy(dtype=np.float64))
        fitted.loc[rows, "fitted_us"] = line.time_us(size)
    return fitted


def _non_negative_line(slopes: NDArray[np.float64], ones: NDArray[np.float64]) -> tuple[float, float]:
    """Minimise sum (a * ones + b * slopes - 1)^2 over a, b >= 0; so only the two edges remain."""
    design = np.column_stack((ones, slopes))
    # Sizes reach 1e9 while the other column stays near 1e-3: scaled columns keep the solve well conditioned.
    scale = np.linalg.norm(design, axis=0)
    free, *_ = np.linalg.lstsq(design / scale, np.ones(len(ones)), rcond=None)
    if free.min() >= 0:
        return float(free[0] / scale[0]), float(free[1] / scale[1])
    edges = [design[:, column].sum() / scale[column] ** 2 for column in (0, 1)]
    only_latency = np.square(design[:, 0] * edges[0] - 1).sum()
    only_bandwidth = np.square(design[:, 1] * edges[1] - 1).sum()
    return (float(edges[0]), 0.0) if only_latency <= only_bandwidth else (0.0, float(edges[1]))
