"""One fully recorded training step of any engine, for models and options that no configuration names.

    def on_rank(rank):
        with Mesh({"data": 2}, device=current().device) as mesh, build_engine(...) as engine:
            return trace_step(rank, "mine", engine, loss, batch)

    records = pool.run(on_rank)[0]
    show(memory_over_step(records.memory))

If a configuration is enough, ``compare`` and ``run_interleaved`` do the same for many steps.
"""

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from shardlab.engines import Engine
from shardlab.experiment.batches import size_of
from shardlab.experiment.run import source_of
from shardlab.experiment.step import TrainStep
from shardlab.experiment.workload import LossFn
from shardlab.trace.clock import clock_for
from shardlab.trace.recorder import Recorder
from shardlab.trace.store import Records, RunWriter, load_run, write_manifest
from shardlab.trace.units import watch_units
from shardlab.units import AUTO

SINCE_BOOT_NS = 0


def trace_step(
    rank: int,
    run: str,
    engine: Engine,
    loss: LossFn,
    batch: Any,
) -> Records:
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
