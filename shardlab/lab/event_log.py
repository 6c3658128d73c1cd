"""The collectives of a few lines of code as rows of table ``collectives``, without a training step.

    def ranks_do(rank):
        with Mesh({"data": 2}, device=current().device) as mesh, log_collectives(mesh, rank) as log:
            mesh.data.all_reduce(torch.ones(4)).wait()
        return log.rows()

    table = collectives_table(pool.run(ranks_do))

For training steps use the recorder in ``trace``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite

import pandas as pd
import torch

from shardlab.comm import CollectiveEvent
from shardlab.comm.mesh import Mesh
from shardlab.tables import COLLECTIVES
from shardlab.trace.clock import clock_for
from shardlab.trace.entries import in_us
from shardlab.trace.observed import Row, collective_columns
from shardlab.vocabulary import Phase

TIMES = ["issue_us", "start_us", "end_us", "wait_start_us", "wait_end_us"]


class EventLog:
    """An observer of collectives that keeps every event.

    Args:
        rank: rank in the rows.
        device: device of the tensors; on CUDA the times are those of the stream.
        run: name of the run in the rows.
    """

    def __init__(self, rank: int, device: torch.device | str = "cpu", run: str = "log") -> None:
        self._rank, self._run = rank, run
        self._clock = clock_for(torch.device(device))
        self._events: list[CollectiveEvent] = []

    def rows(self) -> list[Row]:
        """One row per collective so far, in order of issue; all must have ended. Times count from the boot."""
        self._clock.settle()
        columns = in_us(
            collective_columns([(event, Phase.SETUP) for event in self._events], 0, self._clock, origin_ns=0)
        )
        return [
            {
                "run": self._run, "source": "emulated" if event.emulated else "measured", "rank": self._rank, "step": 0,
                **dict(zip(columns, values, strict=True)),
            }
            for event, *values in zip(self._events, *columns.values(), strict=True)
        ]  # fmt: skip

    def issued(self, event: CollectiveEvent) -> None:
        """Keep the event; its times are filled in later."""
        self._events.append(event)

    def started(self, event: CollectiveEvent) -> None:
        """Its time is in the event."""

    def completed(self, event: CollectiveEvent) -> None:
        """Its time is in the event."""

    def waited(self, event: CollectiveEvent) -> None:
        """Its times are in the event."""


@contextmanager
def log_collectives(mesh: Mesh, rank: int, run: str = "log") -> Iterator[EventLog]:
    """Log every collective of the mesh inside the ``with`` block; yields the log."""
    log = EventLog(rank, mesh.device, run)
    with mesh.observed_by(log):
        yield log


def collectives_table(rows_of_ranks: Iterable[list[Row]]) -> pd.DataFrame:
    """The rows of all ranks as table ``collectives``; times count from the first issue of any rank."""
    rows = [row for rows in rows_of_ranks for row in rows]
    origin_us = min((row["issue_us"] for row in rows if isfinite(row["issue_us"])), default=0.0)
    return COLLECTIVES.frame([row | {name: row[name] - origin_us for name in TIMES} for row in rows])
