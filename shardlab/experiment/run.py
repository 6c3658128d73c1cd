"""One strategy on the ranks: what each rank does, and what it leaves on disk."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardlab.comm import Mesh
from shardlab.data_sets import TextData, batch, load_text
from shardlab.engines import Engine, StepTensors, build_engine, engine_options
from shardlab.experiment.config import DTYPES, CompareConfig
from shardlab.experiment.step import StepResult, TrainStep
from shardlab.launch import RankContext, current
from shardlab.models import build_model, next_token_loss
from shardlab.partition.wire import Link
from shardlab.trace.clock import clock_for
from shardlab.trace.recorder import Recorder
from shardlab.trace.store import RunWriter
from shardlab.trace.units import watch_units
from shardlab.vocabulary import Phase, SpanKind


@dataclass(frozen=True)
class Progress:
    """Sent to the parent after every step."""

    strategy: str
    step: int
    loss: float


@dataclass(frozen=True)
class RankReport:
    """What a rank knows when its run is over.

    Attributes:
        recorder_share: time spent recording over the time of the steps; memory-traced steps left out.
        padding_bytes: bytes of one copy of the parameters that are padding.
    """

    recorder_share: float
    padding_bytes: int


def run_strategy(
    rank: int, config: CompareConfig, strategy: str, directory: Path, origin_ns: int
) -> RankReport | None:
    """Train with one strategy on this rank and record it; None on a rank that takes no part.

    'single' trains on rank 0 alone, on the rows of all ranks and with the threads of all, so that it sees the same
    global batch.
    """
    context = current()
    alone = strategy == "single"
    if alone and rank > 0:
        return None
    num_parts = 1 if alone else config.ranks
    with contextlib.ExitStack() as stack:
        if alone:
            stack.enter_context(_threads(torch.get_num_threads() * config.ranks))
            mesh = stack.enter_context(Mesh.alone(context.device))
        else:
            link = None if config.link is None else Link.parse(config.link)
            mesh = stack.enter_context(Mesh({"data": config.ranks}, device=context.device, link=link))
        recorder = stack.enter_context(_recorder(mesh, strategy, directory, rank, origin_ns))
        engine = stack.enter_context(_engine(config, strategy, mesh, context.device))
        stack.enter_context(_followed(engine, recorder))
        return _train(config, engine, recorder, context, num_parts)


def _train(
    config: CompareConfig, engine: Engine, recorder: Recorder, context: RankContext, num_parts: int
) -> RankReport:
    train_step = TrainStep(
        engine, next_token_loss, accumulation=config.accumulation, max_norm=config.clip, recorder=recorder
    )
    data = load_text(config.text, config.seq_len)
    rows = config.global_batch // config.accumulation // num_parts
    mine = range(engine.comm.rank * rows, (engine.comm.rank + 1) * rows)
    traced = min(2, config.steps - 1)  # the first step in which all optimizer state is there from the beginning
    for step in range(config.steps):
        with recorder.step(step, trace_memory=step == traced):
            result = _one_step(config, train_step, recorder, data, step, mine, context.device)
        recorder.finish_step(
            result.loss, result.grad_norm, result.learning_rate, rows * config.accumulation * config.seq_len
        )
        if engine.comm.rank == 0:
            context.emit(Progress(engine.name, step, result.loss))
    recorder.write_shards(
        [
            {
                "parameter": row.parameter, "shape": "x".join(map(str, row.shape)), "role": row.role,
                "bucket": row.bucket, "start": row.start, "stop": row.stop, "bytes": row.num_bytes,
            }
            for row in engine.shard_map()
        ]
    )  # fmt: skip
    return RankReport(recorder.cost_share, engine.padding_bytes)


def _one_step(
    config: CompareConfig,
    train_step: TrainStep,
    recorder: Recorder,
    data: TextData,
    step: int,
    rows: range,
    device: torch.device,
) -> StepResult:
    result = None
    for micro_batch in range(config.accumulation):
        with recorder.phase(Phase.DATA, SpanKind.DATA):
            inputs, targets = batch(
                data, step, micro_batch, rows, config.global_batch // config.accumulation, config.seq_len, config.seed
            )
        result = train_step(inputs.to(device), targets.to(device))
    assert result is not None
    return result


def _engine(config: CompareConfig, strategy: str, mesh: Mesh, device: torch.device) -> Engine:
    model = build_model(config.model, config.seq_len, DTYPES[config.dtype], config.seed).to(device)
    options = config.engine_options(engine_options(strategy))

    def optimizer_fn(tensors: StepTensors) -> torch.optim.Optimizer:
        return torch.optim.AdamW(tensors, lr=config.learning_rate)

    return build_engine(strategy, model, optimizer_fn, mesh, **options)


@contextlib.contextmanager
def _recorder(mesh: Mesh, run: str, directory: Path, rank: int, origin_ns: int) -> Iterator[Recorder]:
    """Records what the mesh carries from now on: an engine made inside leaves its first broadcast in step -1."""
    writer = RunWriter(directory, rank, run, "emulated" if mesh.data.emulated else "measured")
    try:
        recorder = Recorder(writer, clock_for(mesh.device), origin_ns, device=mesh.device)
        with mesh.observed_by(recorder):
            yield recorder
    finally:
        writer.close()


@contextlib.contextmanager
def _followed(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder sees the engine's units and what it holds."""
    recorder.live_tensors = engine.live_tensors
    hooks = watch_units(engine.module, recorder)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def now_ns() -> int:
    """The origin of a run's time axis."""
    return time.perf_counter_ns()
