"""What a rank does for the bench: it holds several engines and times a step of each in turn.

A machine has slow phases of up to a factor of two. Engines that take turns share them, so the ratio of two neighbouring
steps is far steadier than the times. A step depends on the caches that the step before it left, so the rounds go
through all orders: an engine that was always in the middle was 1.4 % faster than the same engine at the ends. The place
of an engine in memory matters too (the same engine twice, each built once: ratios from 0.99 to 1.03), so after a
session of six rounds the engines are built again, in another order. A barrier comes before every step, and a step lasts
until the slowest rank has ended it. ``floor`` is the same training on every rank alone, without communication.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from time import perf_counter_ns

import torch

from shardlab.bench.config import Contender, Pair, Workload
from shardlab.comm import CollectiveEvent
from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, StepTensors, build_engine
from shardlab.engines.peers import TorchDDP
from shardlab.launch import current
from shardlab.models import GPT, build_model, next_token_loss
from shardlab.tensor_parallel import gpt_plan, parallelize_module
from shardlab.trace.memory_by_role import MemoryLedger
from shardlab.vocabulary import MeshAxis

WARM_UPS = 3  # the first step allocates optimizer state, and in the third DDP with a static graph rebuilds its buckets
OURS, THEIRS, FLOOR = "ours", "theirs", "floor"


@dataclass(frozen=True)
class RoundDone:
    """Sent to the parent after every round."""

    workload: str
    pair: str


@dataclass(frozen=True)
class RankTimes:
    """What a rank measures.

    Attributes:
        step_ns: time of every step of 'ours', 'theirs' and 'floor'.
        peak_bytes: of 'ours' and 'theirs' the highest live bytes of one step: torch's storages and the scratch of
            transports; memory outside torch is left out on both sides: shared memory, and gloo's own buffers.
        transport: transport of our engine.
    """

    step_ns: dict[str, list[int]]
    peak_bytes: dict[str, int]
    transport: str


def time_pair(rank: int, workload: Workload, pair: Pair, rounds: int, transport: str | None = None) -> RankTimes:
    """Time both engines of a pair and the floor on this rank, in turns."""
    device, num_ranks = current().device, current().world_size
    contenders = ((OURS, pair.ours), (THEIRS, pair.theirs))
    # First, one engine at a time: a peak must not contain the memory of the engines that are timed below.
    peaks = {name: _peak_bytes(contender, workload, transport) for name, contender in contenders}
    step_ns: dict[str, list[int]] = {OURS: [], THEIRS: [], FLOOR: []}
    with Mesh({"data": num_ranks}, device=device, transport=transport) as mesh:
        for orders in sessions(rounds):
            with _built(orders[-1], pair, workload, transport) as turns:
                for order in orders:
                    for name in order:
                        mesh.data.barrier().wait()
                        began_ns = perf_counter_ns()
                        turns[name].step()
                        step_ns[name].append(perf_counter_ns() - began_ns)
                    if rank == 0:
                        current().emit(RoundDone(workload.name, pair.name))
        sent_by = mesh.data.transport
    return RankTimes(step_ns, peaks, sent_by)


def sessions(rounds: int) -> Iterator[list[tuple[str, ...]]]:
    """For each session the orders of its rounds: all orders, each time starting with another one."""
    orders = list(permutations((OURS, THEIRS, FLOOR)))
    for number, done in enumerate(range(0, rounds, len(orders))):
        start = number % len(orders)
        yield (orders[start:] + orders[:start])[: rounds - done]


@contextlib.contextmanager
def _built(
    order: tuple[str, ...], pair: Pair, workload: Workload, transport: str | None
) -> Iterator[dict[str, "Turn"]]:
    """The engines, built in this order and warmed up."""
    contenders = {OURS: pair.ours, THEIRS: pair.theirs, FLOOR: None}
    with contextlib.ExitStack() as stack:
        turns = {name: stack.enter_context(_turn(contenders[name], workload, transport)) for name in order}
        for turn in turns.values():  # with all engines in memory, as in the rounds that count
            turn.warm_up()
        yield turns


class Turn:
    """One engine with its model, optimizer and batch.

    Args:
        engine: the strategy.
        workload: what it trains.
    """

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._engine, self._device = engine, engine.mesh.device
        generator = torch.Generator().manual_seed(engine.data_rank)
        tokens = torch.randint(0, 256, (workload.rows, workload.seq_len + 1), generator=generator).to(self._device)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def warm_up(self) -> None:
        """Run the steps that do not count."""
        for _ in range(WARM_UPS):
            self.step()

    def step(self) -> None:
        """Run a whole training step; return when the device is done."""
        loss = next_token_loss(self._engine(self._inputs), self._targets)
        self._engine.backward(loss)
        self._engine.step()
        self._engine.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int:
        """Run a step and return its highest live bytes; nothing else may be alive on the device."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.step()
            return torch.cuda.max_memory_allocated(self._device)
        ledger = MemoryLedger(self._engine.live_tensors())
        with self._engine.mesh.observed_by(_Scratch(ledger)), ledger:
            self.step()
        return ledger.peak().num_bytes


class _Scratch:
    """An observer that tells a ledger about the scratch memory of transports."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger

    def issued(self, event: CollectiveEvent) -> None:
        """Nothing: roles do not matter for a total."""

    def started(self, event: CollectiveEvent) -> None:
        """Count the scratch memory that is taken."""
        self._ledger.started(event)

    def completed(self, event: CollectiveEvent) -> None:
        """Count the scratch memory that is released."""
        self._ledger.completed(event)

    def waited(self, event: CollectiveEvent) -> None:
        """Nothing."""


def _peak_bytes(contender: Contender, workload: Workload, transport: str | None) -> int:
    """Peak of this engine alone, in an observed group: what torch's transport holds counts too."""
    observed = {name: True for name in contender.options if name == "observed"}
    listened_to = replace(contender, options={**contender.options, **observed})
    with _turn(listened_to, workload, transport) as turn:
        turn.warm_up()
        return turn.peak_bytes()


@contextlib.contextmanager
def _turn(contender: Contender | None, workload: Workload, transport: str | None) -> Iterator[Turn]:
    """A contender ready to train; None for a rank that trains alone."""
    device, num_ranks = current().device, current().world_size
    model = build_model(workload.model, workload.seq_len).to(device)
    with contextlib.ExitStack() as stack:
        if contender is None:
            engine = stack.enter_context(build_engine("single", model, _adamw, Mesh.alone(device)))
        else:
            mesh = stack.enter_context(Mesh(contender.mesh_axes(num_ranks), device=device, transport=transport))
            if contender.parallelized:
                assert isinstance(model, GPT)  # checked by Pair.check
                parallelize_module(model, gpt_plan(model.config), mesh[MeshAxis.TENSOR])
            built = build_engine(contender.strategy, model, _adamw, mesh, **contender.options)
            engine = stack.enter_context(built)
            if contender.static_graph:
                _tell_static_graph(engine)
        yield Turn(engine, workload)


def _tell_static_graph(engine: Engine) -> None:
    """Tell DDP, before its first forward, that every step uses the same parameters in the same order."""
    assert isinstance(engine, TorchDDP), engine.name  # see PAIRS
    # Private: the public way is an argument of DDP's constructor, which does the same, but the engine calls that.
    engine._ddp._set_static_graph()


def _adamw(tensors: StepTensors) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=1e-4)
