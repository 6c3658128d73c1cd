"""From rows of a record to intervals: which rows belong to one rank's step, and which times cannot be true."""

from typing import cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.analysis.intervals import Intervals

KEYS = ["run", "source", "rank", "step"]

Key = tuple[str, str, int, int]


def bounds(frame: pd.DataFrame, start: str, end: str, table: str) -> Intervals:
    """The columns ``start`` and ``end`` as intervals, one for each row.

    Raises:
        ValueError: a time is missing, or the clock ran backwards; the message names the row.
    """
    times = np.column_stack((numbers(frame, start), numbers(frame, end)))
    missing = ~np.isfinite(times)
    if missing.any():
        row, column = (int(index) for index in np.argwhere(missing)[0])
        raise ValueError(f"{_name(frame, row, table)} has no {(start, end)[column]}: a time is needed in every row")
    backwards = times[:, 1] < times[:, 0]
    if backwards.any():
        row = int(np.argmax(backwards))
        raise ValueError(
            f"{_name(frame, row, table)} ends before it begins: "
            f"{end} {times[row, 1]:g} < {start} {times[row, 0]:g}; its clock ran backwards"
        )
    return times


def numbers(frame: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """A column as float64, missing values as NaN."""
    return frame[column].to_numpy(dtype=np.float64, na_value=np.nan)


def positions(frame: pd.DataFrame) -> dict[Key, NDArray[np.intp]]:
    """Positions of the rows of each (run, source, rank, step), in order of first appearance."""
    if not len(frame):
        return {}
    indices = cast("dict[Key, NDArray[np.intp]]", frame.groupby(KEYS, sort=False).indices)
    return {(str(run), str(source), int(rank), int(step)): rows for (run, source, rank, step), rows in indices.items()}


def _name(frame: pd.DataFrame, row: int, table: str) -> str:
    """A row in words: table, label, run, rank, step and what it is."""
    values = frame.iloc[row]
    what = next((str(values[column]) for column in ("tag", "unit") if column in frame.columns), "")
    return (
        f"table {table!r}: row {frame.index[row]} "
        f"(run {values['run']}, rank {values['rank']}, step {values['step']}, {what!r})"
    )
