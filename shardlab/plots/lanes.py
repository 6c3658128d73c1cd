"""The rows of a timeline: for each rank one of compute, then one of communication for each axis of the mesh.

Collectives of one axis that are in flight at the same time get rows below each other.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

COMPUTE = "compute"
MAX_ROWS = 6
RANK_GAP = 0.35


@dataclass(frozen=True)
class Lanes:
    """Where each lane lies: ``positions[(rank, lane)]`` are its rows from top to bottom, as y downward from 0."""

    positions: dict[tuple[int, str], list[float]]
    num_rows: int

    @property
    def bottom(self) -> float:
        """The largest y."""
        return max(row for rows in self.positions.values() for row in rows)

    def labels(self) -> tuple[list[float], list[str]]:
        """Tick positions and names: the rank's name stands beside its first lane."""
        named: set[int] = set()
        ticks, names = [], []
        for (rank, lane), rows in self.positions.items():
            ticks.append(float(np.mean(rows)))
            words = lane if lane == COMPUTE else f"{lane} axis"
            names.append(words if rank in named else f"<b>rank {rank}</b>  {words}")
            named.add(rank)
        return ticks, names


def lay_out(collectives: pd.DataFrame, spans: pd.DataFrame) -> tuple[Lanes, NDArray[np.float64]]:
    """Lanes of one step, and the y of each collective.

    Args:
        collectives: rows of one step with ``start_us`` and ``end_us``.
        spans: rows of one step.
    """
    ranks = sorted({int(rank) for rank in [*spans["rank"], *collectives["rank"]]})
    axes = [str(axis) for axis in collectives["axis"].drop_duplicates()]
    has_compute = len(spans) > 0
    places, y, num_rows = np.zeros(len(collectives)), 0.0, 0
    positions: dict[tuple[int, str], list[float]] = {}
    for rank in ranks:
        here = (collectives["rank"] == rank).to_numpy(dtype=np.bool_)
        mine = [axis for axis in axes if (here & (collectives["axis"] == axis).to_numpy(dtype=np.bool_)).any()]
        for lane in ([COMPUTE] if has_compute else []) + mine:
            where = np.flatnonzero(here & (collectives["axis"] == lane).to_numpy(dtype=np.bool_))
            rows = concurrent_rows(collectives.iloc[where]) if lane != COMPUTE else np.zeros(0, dtype=np.intp)
            count = int(rows.max()) + 1 if len(rows) else 1
            places[where] = y + rows
            positions[rank, lane] = [y + row for row in range(count)]
            y, num_rows = y + count, num_rows + count
        y += RANK_GAP
    return Lanes(positions, num_rows), places


def concurrent_rows(collectives: pd.DataFrame) -> NDArray[np.intp]:
    """The first free row for each collective in order of its start; beyond MAX_ROWS they share the last."""
    starts = collectives["start_us"].to_numpy(dtype=np.float64)
    ends = collectives["end_us"].to_numpy(dtype=np.float64)
    rows, free_from = np.zeros(len(starts), dtype=np.intp), [-np.inf] * MAX_ROWS
    for index in np.argsort(starts, kind="stable"):
        row = next((row for row in range(MAX_ROWS) if free_from[row] <= starts[index]), MAX_ROWS - 1)
        rows[index], free_from[row] = row, max(free_from[row], ends[index])
    return rows
