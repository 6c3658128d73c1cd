"""A small recorded training, run inside ranks."""

import gc
import itertools
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, build_engine
from shardlab.experiment import TrainStep
from shardlab.partition.ring_cost import Link
from shardlab.records.store import RunWriter
from shardlab.trace.clock import Clock, HostClock
from shardlab.trace.recorder import Recorder
from shardlab.trace.units import watch_units

CPU = torch.device("cpu")


class MLP(nn.Module):
    """1 + 6 * 7 + 7 * 5 + ... elements: no number of ranks divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.last = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x) * self.scale


class NeverOffCpu(HostClock):
    """A thread that computes whatever it does, and however busy the machine is."""

    def cpu_time(self) -> Callable[[], int]:
        # Not the time itself: between that and this the machine may be busy, which looks like time off the CPU.
        return itertools.count(step=10**9).__next__


@dataclass
class Setting:
    """What to train and how; everything that a rank needs, in one object that travels."""

    strategy: str = "bucketed"
    steps: int = 3
    directory: Path | None = None
    options: dict[str, int] = field(default_factory=lambda: {"bucket_bytes": 300})
    model: Callable[[], nn.Module] = MLP
    link: str | None = None
    transport: str | None = None
    traced: int | None = None
    at_rest: Callable[[Engine, TrainStep], object] | None = None  # called just before the recorder samples
    clock: Callable[[], Clock] = NeverOffCpu  # for tests of the order of things
    origin_ns: int = field(default_factory=perf_counter_ns)  # of all ranks


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    at_rest: list[object] = field(default_factory=list)


def adamw(tensors: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=1e-2)  # type: ignore[arg-type]


def train(rank: int, setting: Setting) -> Outcome:
    """Recorded where there is a directory, else not."""
    outcome = Outcome()
    torch.manual_seed(0)
    with ExitStack() as stack:
        if setting.at_rest is not None:
            # What was there before is not the training's: the collector does not list frozen objects.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
        mesh = stack.enter_context(_mesh(setting))
        recorder = None
        if setting.directory is not None:
            writer = stack.enter_context(closing(RunWriter(setting.directory, rank, setting.strategy, "measured")))
            recorder = Recorder(writer, setting.clock(), setting.origin_ns, device=CPU)
            stack.enter_context(mesh.observed_by(recorder))
        options = setting.options if setting.strategy in ("bucketed", "zero1") else {}
        engine = stack.enter_context(build_engine(setting.strategy, setting.model(), adamw, mesh, **options))
        train_step = TrainStep(engine, mse, max_norm=1.0, recorder=recorder)
        if recorder is not None:
            recorder.live_tensors = engine.live_tensors
            for hook in watch_units(engine.module, recorder):
                stack.callback(hook.remove)
            if setting.at_rest is not None:
                _before_at_rest(recorder, lambda: outcome.at_rest.append(setting.at_rest(engine, train_step)))
        for step in range(setting.steps):
            outcome.losses.append(_step(recorder, train_step, rank, step, setting))
        outcome.params = [param.detach().clone() for param in engine.params.values()]
    return outcome


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _step(recorder: Recorder | None, train_step: TrainStep, rank: int, step: int, setting: Setting) -> float:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)
    if recorder is None:
        result = train_step((x, y))
    else:
        with recorder.step(step, trace_memory=step == setting.traced):
            result = train_step((x, y))
        recorder.finish_step(result.loss, result.grad_norm, result.learning_rate, num_tokens=4)
    assert result is not None
    return result.loss


def _before_at_rest(recorder: Recorder, look: Callable[[], object]) -> None:
    sample = recorder.at_rest

    def at_rest() -> None:
        look()
        sample()

    recorder.at_rest = at_rest  # type: ignore[method-assign]


def _mesh(setting: Setting) -> Mesh:
    if not dist.is_initialized():
        return Mesh.alone()
    link = None if setting.link is None else Link.parse(setting.link)
    return Mesh({"data": dist.get_world_size()}, link=link, transport=setting.transport)
