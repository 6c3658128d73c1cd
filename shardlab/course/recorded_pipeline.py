"""A pipeline's step, recorded: which stage worked on which micro-batch when, and how much of the time ranks idled.

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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from math import nan
from pathlib import Path

import pandas as pd
from torch import Tensor

from shardlab.engines import Engine
from shardlab.experiment.run.pipeline_step import PHASES
from shardlab.experiment.run.rank_run import source_of
from shardlab.pipeline import Pipeline
from shardlab.pipeline.pipeline import Loss
from shardlab.records.store import Records, RunWriter, load_run, write_manifest
from shardlab.schedules import Action, Kind, Played
from shardlab.trace.clock import clock_for
from shardlab.trace.recorder import Recorder
from shardlab.vocabulary import Phase, SpanKind
from shardlab.why.pipelined import PipelinedStep, pipelined_steps

WARM_UPS = 1
SINCE_BOOT_NS = 0


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
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder), {"run": run})
        with closing(RunWriter(Path(folder), rank, run, source_of(engine.mesh))) as writer:
            recorder = Recorder(writer, clock_for(engine.mesh.device), SINCE_BOOT_NS, device=engine.mesh.device)

            def watch(action: Action) -> AbstractContextManager[None]:
                return recorder.phase(*PHASES[action.kind is Kind.FORWARD], str(action))

            for _ in range(WARM_UPS):
                pipeline.run(engine, loss_fn, inputs, targets)
                engine.step()
                engine.zero_grad()
            with engine.mesh.observed_by(recorder):
                with recorder.step(WARM_UPS):
                    loss = pipeline.run(engine, loss_fn, inputs, targets, watch=watch)
                    with recorder.phase(Phase.STEP, SpanKind.OPTIMIZER):
                        engine.step()
                recorder.finish_step(nan if loss is None else loss.item(), nan, engine.learning_rate, len(inputs))
            engine.zero_grad()
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
