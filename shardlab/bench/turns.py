"""What takes a turn in the bench: an engine, or a rank's stages, with a model, an optimizer and a batch of its own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.comm.mesh import Mesh
from shardlab.engines import AnyEngine, Engine, build_engine
from shardlab.engines.peers import TorchDDP
from shardlab.engines.peers.torch_pipeline import TorchPipeline
from shardlab.launch import current
from shardlab.models import GPT, build_model, next_token_loss
from shardlab.pipeline import Pipeline
from shardlab.pipeline.stages import module_of
from shardlab.schedules import make_schedule
from shardlab.tensor_parallel import gpt_plan, parallelize_module
from shardlab.trace.memory_by_role import LiveTensors, MemoryLedger
from shardlab.vocabulary import MeshAxis, Role

WARM_UPS = 3  # the first step allocates optimizer state, and in the third DDP with a static graph rebuilds its buckets


@dataclass(frozen=True)
class Workload:
    """A training that is timed.

    Attributes:
        name: name in the results.
        model: a name from ``models.MODELS``.
        rows: sequences per rank and step.
        seq_len: tokens of a sequence.
        round_factor: factor on the number of rounds: short steps scatter more.
    """

    name: str
    model: str
    rows: int
    seq_len: int
    round_factor: int = 1


@dataclass(frozen=True)
class Contender:
    """An engine and how it is built.

    Attributes:
        name: name in the results.
        strategy: a name from ``engines.STRATEGIES``.
        options: options of that strategy.
        over_tensor: whether the ranks are the mesh's tensor axis, not its data axis.
        parallelized: whether ``parallelize_module`` divides the model first, by the plan for GPTs.
        over_pipe: whether the ranks are the mesh's axis of stages, of which each row is a micro-batch, by 1F1B.
    """

    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    over_tensor: bool = False
    parallelized: bool = False
    over_pipe: bool = False


class Turn:
    """A training that can be stepped and whose memory can be looked at.

    Args:
        mesh: over which it sends.
        train: a whole step, which the device may not have done yet.
        live: the tensors that it holds between steps.
    """

    def __init__(self, mesh: BaseMesh, train: Callable[[], object], live: Callable[[], LiveTensors]) -> None:
        self.mesh, self.live, self._train = mesh, live, train
        self._on_gpu = mesh.device.type == "cuda"

    def warm_up(self) -> None:
        """Run the steps that do not count."""
        for _ in range(WARM_UPS):
            self.step()

    def step(self) -> None:
        """Run a whole training step; return when the device is done."""
        self._train()
        if self._on_gpu:
            torch.cuda.synchronize(self.mesh.device)

    def peak_bytes(self) -> int:
        """Run a step and return its highest live bytes; nothing else may be alive on the device."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.mesh.device)
            self.step()
            return torch.cuda.max_memory_allocated(self.mesh.device)
        ledger = MemoryLedger(self.live())
        with self.mesh.observed_by(ledger), ledger:
            self.step()
        return ledger.peak().num_bytes


@contextmanager
def turn_of(contender: Contender | None, workload: Workload, transport: str | None) -> Iterator[Turn]:
    """A contender ready to train; None for a rank that trains alone."""
    device, num_ranks = current().device, current().world_size
    model = build_model(workload.model, workload.seq_len).to(device)
    if contender is None:
        with build_engine("single", model, _adamw, Mesh.alone(device)) as engine:
            yield _of_engine(engine, workload)
        return
    if contender.over_pipe:
        if isinstance(model, GPT):
            model = GPT(replace(model.config, tied=False)).to(device)  # torch's runtime does not add up a tied weight's
        with Mesh({"pipe": num_ranks, "data": 1}, device=device, transport=transport) as mesh:
            made = _of_torchs_stages if contender.strategy == "torch_pipeline" else _of_stages
            with made(model, workload, mesh) as turn:
                yield turn
        return
    axes = {"data": 1, "tensor": num_ranks} if contender.over_tensor else {"data": num_ranks}
    with Mesh(axes, device=device, transport=transport) as mesh:
        if contender.parallelized:
            assert isinstance(model, GPT)  # checked by BenchConfig
            parallelize_module(model, gpt_plan(model.config), mesh[MeshAxis.TENSOR])
        with build_engine(contender.strategy, model, _adamw, mesh, **contender.options) as engine:
            if isinstance(engine, TorchDDP):
                # Every step of all workloads uses the same parameters in the same order. Private: the public way is an
                # argument of DDP's constructor, which does the same, but the engine calls that.
                engine._ddp._set_static_graph()
            yield _of_engine(engine, workload)


def _of_engine(engine: AnyEngine, workload: Workload) -> Turn:
    inputs, targets = _rows(workload.rows, workload, engine.data_rank, engine.mesh.device)

    def train() -> None:
        engine.backward(next_token_loss(engine(inputs), targets))
        engine.step()
        engine.zero_grad()

    return Turn(engine.mesh, train, engine.live_tensors)


@contextmanager
def _of_stages(model: nn.Module, workload: Workload, mesh: BaseMesh) -> Iterator[Turn]:
    """Ours: 1F1B over the mesh's axis of stages; a row is a micro-batch."""
    pipeline, rows = _pipeline_and_rows(model, workload, mesh)
    with build_engine("ddp", pipeline.module, _adamw, mesh) as engine:
        assert isinstance(engine, Engine)
        own: Engine = engine

        def train() -> None:
            pipeline.run(own, next_token_loss, *rows)
            own.step()
            own.zero_grad()

        yield Turn(mesh, train, own.live_tensors)


@contextmanager
def _of_torchs_stages(model: nn.Module, workload: Workload, mesh: BaseMesh) -> Iterator[Turn]:
    """Torch's runtime, with the same cut, table of actions, rows and optimizer."""
    pipeline, rows = _pipeline_and_rows(model, workload, mesh)
    schedule, place = pipeline.schedule, mesh[MeshAxis.PIPE].rank
    stages = {
        stage: module_of(model, {stage: parts})
        for stage, parts in enumerate(pipeline.cut) if schedule.rank_of[stage] == place
    }  # fmt: skip
    number, actions = schedule.num_micro_batches, schedule.to_csv()
    theirs = TorchPipeline(stages, schedule.num_stages, actions, number, next_token_loss, mesh)
    params: list[Tensor] = list(pipeline.module.parameters())
    optimizer = _adamw(params)

    def train() -> None:
        theirs.run(*rows)
        optimizer.step()
        optimizer.zero_grad()

    def live() -> LiveTensors:
        state = [value for kept in optimizer.state.values() for value in kept.values()]
        return {Role.PARAMETER: params, Role.OPTIMIZER_STATE: [one for one in state if isinstance(one, Tensor)]}

    yield Turn(mesh, train, live)


def _pipeline_and_rows(model: nn.Module, workload: Workload, mesh: BaseMesh) -> tuple[Pipeline, tuple[Tensor, Tensor]]:
    """This rank's stages, and the rows that all of them take."""
    num_ranks = mesh[MeshAxis.PIPE].num_ranks
    rows = _rows(workload.rows * num_ranks, workload, 0, mesh.device)
    return Pipeline(model, make_schedule("1f1b", num_ranks, workload.rows * num_ranks), mesh), rows


def _rows(number: int, workload: Workload, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [rows, seq_len] each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (number, workload.seq_len + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _adamw(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=1e-4)
