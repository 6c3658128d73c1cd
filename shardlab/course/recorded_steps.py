"""Steps of an engine made by hand, recorded: one of any engine, and a pipeline's with how much of the time ranks idled.

    def on_rank(rank):
        with Mesh({"data": 2}, device=current().device) as mesh, build_engine(...) as engine:
            return trace_step(rank, "mine", engine, loss, batch)

    show(memory_over_step(pool.run(on_rank)[0].memory))

    def on_rank(rank, schedule):
        with Mesh({"pipe": 2, "data": 1}) as mesh:
            pipeline = Pipeline(model(), schedule, mesh)
            with build_engine("ddp", pipeline.module, AdamW, mesh) as engine:
                return record_pipeline(rank, "1f1b", pipeline, engine, loss_fn, inputs, targets)

    records = pool.run(on_rank, schedule)
    bubbles({"1f1b": records})

What is work and what is waiting, and how a step is foretold, says ``shardlab.why.pipelined``.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from shardlab.engines import AnyEngine, Engine
from shardlab.experiment.run.pipeline_step import PHASES
from shardlab.experiment.run.rank_run import source_of
from shardlab.experiment.run.train_step import TrainStep
from shardlab.experiment.trained.batches import size_of
from shardlab.experiment.trained.workload import LossFn
from shardlab.pipeline import Pipeline
from shardlab.pipeline.pipeline import Loss
from shardlab.records.store import Records, RunWriter, load_run, write_manifest
from shardlab.schedules import Action, Kind, Played
from shardlab.trace.clock import clock_for
from shardlab.trace.recorder import Recorder
from shardlab.trace.units import watch_units
from shardlab.units import AUTO
from shardlab.vocabulary import Phase, SpanKind
from shardlab.why.pipelined import PipelinedStep, pipelined_steps

SINCE_BOOT_NS = 0


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

    def train(recorder: Recorder) -> None:
        recorder.live_tensors = engine.live_tensors
        train_step = TrainStep(engine, loss, recorder=recorder)
        with ExitStack() as stack:
            for hook in watch_units(engine.module, recorder, getattr(engine, "wrap", AUTO)):
                stack.callback(hook.remove)
            for step in (0, 1):
                with recorder.step(step, trace_memory=step == 1):
                    result = train_step(batch)
                assert result is not None, "no accumulation, so every call is a step"
                recorder.finish_step(result.loss, result.grad_norm, result.learning_rate, size_of(batch))

    return _record(rank, run, engine, train)


def record_pipeline(
    rank: int, run: str, pipeline: Pipeline, engine: Engine, loss_fn: Loss, inputs: Tensor, targets: Tensor
) -> Records:
    """Train two steps on one batch, and record the second: a span for each action, under its text, such as '2F0'.

    Args:
        rank: of this process, for the tables.
        run: name of the run in the tables.
        pipeline: as ``engine`` and the rest, see ``Pipeline.run``.
        engine: around ``pipeline.module``.
        loss_fn: of the last stage's output and targets.
        inputs: this data rank's rows.
        targets: likewise.

    Returns:
        The tables of this rank, with times since the boot.
    """

    def train(recorder: Recorder) -> None:
        def watch(action: Action) -> AbstractContextManager[None]:
            return recorder.phase(*PHASES[action.kind is Kind.FORWARD], str(action))

        def waits(action: Action) -> AbstractContextManager[None]:
            return recorder.phase(PHASES[action.kind is Kind.FORWARD][0])

        with recorder.step(1):
            with recorder.phase(Phase.BACKWARD):
                loss = pipeline.run(engine, loss_fn, inputs, targets, watch=watch, waits=waits)
            with recorder.phase(Phase.STEP, SpanKind.OPTIMIZER):
                engine.step()
        recorder.finish_step(nan if loss is None else loss.item(), nan, engine.learning_rate, len(inputs))

    pipeline.run(engine, loss_fn, inputs, targets)
    engine.step()
    engine.zero_grad()
    records = _record(rank, run, engine, train)
    engine.zero_grad()
    return records


def _record(rank: int, run: str, engine: AnyEngine, train: Callable[[Recorder], None]) -> Records:
    """What the recorder that ``train`` gets has written of this rank."""
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder), {"run": run})
        # Closed before it is read: that turns the journal into tables.
        with closing(RunWriter(Path(folder), rank, run, source_of(engine.mesh))) as writer:
            recorder = Recorder(writer, clock_for(engine.mesh.device), SINCE_BOOT_NS, device=engine.mesh.device)
            with engine.mesh.observed_by(recorder):
                train(recorder)
        return load_run(folder)


def played_of(records: Sequence[Records]) -> Played:
    """The step that ranks of one pipeline have done, in milliseconds; for ``schedule_chart``."""
    done = _recorded(records).done
    times = ({action: us / 1e3 for action, us in one.items()} for one in (done.begins, done.ends, done.work))
    return Played(done.schedule, *times)


def bubbles(runs: Mapping[str, Sequence[Records]]) -> pd.DataFrame:
    """By run: the length of the step's actions, the bubble as measured, and as foretold by the same list."""
    rows = {}
    for name, records in runs.items():
        step = _recorded(records)
        schedule, foretold = step.done.schedule, step.foretold()
        rows[name] = {
            "step (ms)": step.done.seconds / 1e3, "foretold (ms)": foretold.seconds / 1e3, "bubble": step.done.bubble,
            "bubble foretold": foretold.bubble,
            "most micro-batches held": max(schedule.in_flight(rank) for rank in range(len(schedule.ranks))),
        }  # fmt: skip
    return pd.DataFrame(rows).T.rename_axis("schedule")


def _recorded(records: Sequence[Records]) -> PipelinedStep:
    collectives, spans = (pd.concat([getattr(one, name) for one in records]) for name in ("collectives", "spans"))
    return pipelined_steps(collectives, spans)[0]
