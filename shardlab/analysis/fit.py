"""The latency-bandwidth model of a message: time = latency + bytes / bandwidth, fitted to measured times.

Least squares of the RELATIVE error, so that a message of 1 kB counts as much as one of 100 MB, with neither coefficient
below zero (Hockney 1994: r_inf and the startup time).
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

MESSAGE_COLUMNS = ("op", "bytes", "time_us")


@dataclass(frozen=True)
class LatencyBandwidth:
    """A line through message times: ``latency_us`` in microseconds, ``bandwidth_gb_per_s`` in 1e9 BYTES a second.

    The bandwidth is infinite where time did not grow with size.
    """

    latency_us: float
    bandwidth_gb_per_s: float

    def time_us(self, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Time the model gives for messages of ``num_bytes``, in microseconds."""
        return self.latency_us + np.asarray(num_bytes, dtype=np.float64) / (self.bandwidth_gb_per_s * 1e3)


def fit_latency_bandwidth(num_bytes: ArrayLike, time_us: ArrayLike) -> LatencyBandwidth:
    """Fit the model to messages.

    Args:
        num_bytes: sizes, at least two different ones.
        time_us: times in microseconds, all above zero.

    Raises:
        ValueError: fewer than two sizes, lengths that differ, or a time that is not above zero.
    """
    size, time = np.asarray(num_bytes, dtype=np.float64), np.asarray(time_us, dtype=np.float64)
    if size.shape != time.shape or len(np.unique(size)) < 2:
        raise ValueError(f"num_bytes and time_us: need equal lengths and two sizes, got {size.shape} and {time.shape}")
    if not (np.isfinite(time) & (time > 0)).all() or not (np.isfinite(size) & (size >= 0)).all():
        raise ValueError("time_us must be above 0 and num_bytes 0 or more, without missing values")
    latency_us, us_per_byte = _non_negative_line(size / time, 1 / time)
    return LatencyBandwidth(latency_us, 1e-3 / us_per_byte if us_per_byte > 0 else float("inf"))


def with_fit(messages: pd.DataFrame) -> pd.DataFrame:
    """``messages`` (columns op, bytes, time_us, ...) with ``fitted_us``: one fit for each op.

    Raises:
        ValueError: a column is missing, or an op has fewer than two sizes.
    """
    missing = [name for name in MESSAGE_COLUMNS if name not in messages.columns]
    if missing:
        raise ValueError(f"messages: missing columns {missing}; needs {', '.join(MESSAGE_COLUMNS)}")
    fitted = messages.assign(fitted_us=np.nan)
    for op in messages["op"].unique():
        rows = messages["op"] == op
        size = messages.loc[rows, "bytes"].to_numpy(dtype=np.float64)
        line = fit_latency_bandwidth(size, messages.loc[rows, "time_us"].to_numpy(dtype=np.float64))
        fitted.loc[rows, "fitted_us"] = line.time_us(size)
    return fitted


def _non_negative_line(slopes: NDArray[np.float64], ones: NDArray[np.float64]) -> tuple[float, float]:
    """Minimise sum (a * ones + b * slopes - 1)^2 over a, b >= 0; with two unknowns the edges can be tried in turn."""
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
