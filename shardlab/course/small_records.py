"""Records of a few lines of code: the collectives that they issue, or one training step of any engine.

    def ranks_do(rank):
        with Mesh({"data": 2}, device=current().device) as mesh, log_collectives(mesh, rank) as log:
            mesh.data.all_reduce(torch.ones(4)).wait()
        return log.rows()

    table = collectives_table(pool.run(ranks_do))

    def on_rank(rank):
        with Mesh({"data": 2}, device=current().device) as mesh, build_engine(...) as engine:
            return trace_step(rank, "mine", engine, loss, batch)

    show(memory_over_step(pool.run(on_rank)[0].memory))

If a configuration is enough, ``compare`` and ``run_interleaved`` record many steps.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from shardlab.comm import CollectiveEvent, Observer
from shardlab.comm.mesh import Mesh
from shardlab.engines import AnyEngine
from shardlab.experiment.batches import size_of
from shardlab.experiment.run import source_of
from shardlab.experiment.train_step import TrainStep
from shardlab.experiment.workload import LossFn
from shardlab.tables import COLLECTIVES
from shardlab.trace.clock import clock_for
from shardlab.trace.entries import in_us
from shardlab.trace.observed import Row, collective_columns
from shardlab.trace.recorder import Recorder
from shardlab.trace.store import Records, RunWriter, load_run, write_manifest
from shardlab.trace.units import watch_units
from shardlab.units import AUTO
from shardlab.vocabulary import Phase

SINCE_BOOT_NS = 0
TIMES = ["issue_us", "start_us", "end_us", "wait_start_us", "wait_end_us"]


class EventLog(Observer):
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
        events = [(event, Phase.SETUP) for event in self._events]
        columns = in_us(collective_columns(events, 0, self._clock, origin_ns=SINCE_BOOT_NS))
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


def trace_step(rank: int, run: str, engine: AnyEngine, loss: LossFn, batch: Any) -> Records:
    """Train two steps on one batch and record both; memory is traced by role in the second.

    The first step allocates the optimizer state. Every rank of the mesh must call this.

    Args:
        rank: rank of this process, for the tables.
        run: name of the run in the tables.
        engine: any strategy.
        loss: (model, batch) -> the mean loss over the rows.
        batch: of this rank.

    Returns:
        The tables of this rank. Times count from the boot, so those of all ranks of a host are comparable.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_manifest(Path(folder), {"run": run})
        writer = stack.enter_context(closing(RunWriter(Path(folder), rank, run, source_of(engine.mesh))))
        recorder = Recorder(writer, clock_for(engine.mesh.device), SINCE_BOOT_NS, device=engine.mesh.device)
        recorder.live_tensors = engine.live_tensors
        stack.enter_context(engine.mesh.observed_by(recorder))
        for hook in watch_units(engine.module, recorder, getattr(engine, "wrap", AUTO)):
            stack.callback(hook.remove)
        train_step = TrainStep(engine, loss, recorder=recorder)
        for step in (0, 1):
            with recorder.step(step, trace_memory=step == 1):
                result = train_step(batch)
            assert result is not None, "no accumulation, so every call is a step"
            recorder.finish_step(result.loss, result.grad_norm, result.learning_rate, size_of(batch))
        writer.close()  # turns the journal into tables, and the folder is gone after the return
        return load_run(folder)
