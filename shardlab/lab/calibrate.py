"""Measures what this machine's ranks take for operations and messages, in under two minutes."""

import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import Pending
from shardlab.comm.mesh import Mesh
from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.forecast import forecast_step, seconds_in, steered_by
from shardlab.experiment.workload import Workload
from shardlab.installed import __version__
from shardlab.lab.operation_times import Meet, operation_times
from shardlab.launch import RankPool
from shardlab.launch.pool import num_cores
from shardlab.planner.machine import Line, Machine, RankCosts
from shardlab.planner.setup import STRATEGIES

MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
VERBS = ("all_reduce", "reduce_scatter", "all_gather")
READINGS = 7
TRIED = 0.2  # by which operations are made slower, to see how much a forecast moves
VERSIONS = {"torch": torch.__version__, "shardlab": __version__}


def calibrate(ranks: Sequence[int] = (2, 3, 4), on_progress: Callable[[str], None] = lambda _: None) -> Machine:
    """What this machine's ranks take; nothing else should run meanwhile.

    Args:
        ranks: numbers of ranks that are measured, besides one with the threads of all.
        on_progress: told what is measured next.
    """
    found: dict[str, RankCosts] = {}
    for count in ranks:
        on_progress(f"{count} ranks")
        with RankPool(count, device="cpu") as pool:
            costs = _with_host(pool, count, _slowest(pool.run(_measured)))
            found[str(count)] = _with_pace(pool, count, costs)
            if "single" not in found:
                on_progress("one rank with the cores of all")
                alone = pool.run(_measured_alone)[0]
                assert alone is not None
                found["single"] = alone
    return Machine(platform.node(), VERSIONS, num_cores(), found)


def differs_here(machine: Machine) -> str:
    """How the calibrated machine differs from this one: 'on node-7, with torch 2.11'; empty if it does not."""
    said = (
        []
        if (machine.name, machine.cores) == (platform.node(), num_cores())
        else [f"on {machine.name} with {machine.cores} cores"]
    )
    said += [f"with {name} {version}" for name, version in machine.versions.items() if VERSIONS.get(name) != version]
    return ", ".join(said)


def _tiny_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(12)))


def _tiny_batches(rank: int, ranks: int, seed: int) -> Iterator[Tensor]:  # noqa: ARG001
    while True:
        yield torch.ones(4, 16)


def _tiny_loss(model: Any, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


TINY = Workload(_tiny_model, _tiny_batches, _tiny_loss, wrap="*")


def _with_host(pool: RankPool, ranks: int, costs: RankCosts) -> RankCosts:
    """With what engines take beside operations: of a tiny model, what its forecast without that falls short by."""
    machine, found = Machine("", {}, 0, {str(ranks): costs}), {}
    with tempfile.TemporaryDirectory() as directory:
        for strategy in (name for name in STRATEGIES if name != "single"):
            config = CompareConfig(strategies=(strategy,), ranks=ranks, steps=24, workload=TINY, device="cpu")
            done = compare(config, f"{directory}/{strategy}", pool=pool, on_progress=lambda _: None)
            short = seconds_in(done.records.steps) - forecast_step(config, strategy, machine).seconds
            found[strategy] = max(0.0, short) / steered_by(config, strategy)
    return replace(costs, host=found)


def _layers() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(160, 4, 640, 0.0, nn.functional.gelu, batch_first=True) for _ in range(4))
    return nn.Sequential(*layers)


def _rows(rank: int, ranks: int, seed: int) -> Iterator[Tensor]:  # noqa: ARG001
    while True:
        yield torch.ones(6, 48, 160)


LAYERS = Workload(_layers, _rows, _tiny_loss)


def _with_pace(pool: RankPool, ranks: int, costs: RankCosts) -> RankCosts:
    """With how much longer operations take in a step, where memory was freed and others have the caches."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for strategy in costs.host:
            config = CompareConfig(strategies=(strategy,), ranks=ranks, steps=8, workload=LAYERS, device="cpu")
            done = compare(config, f"{directory}/{strategy}", pool=pool, on_progress=lambda _: None)
            alone, slower = (
                forecast_step(config, strategy, Machine("", {}, 0, {str(ranks): replace(costs, pace={strategy: pace})}))
                for pace in (1.0, 1.0 + TRIED)
            )
            short = seconds_in(done.records.steps) - alone.seconds
            found[strategy] = max(0.5, 1 + TRIED * short / (slower.seconds - alone.seconds))
    return replace(costs, pace=found)


def _slowest(of_ranks: Sequence[RankCosts]) -> RankCosts:
    """Messages take what the slowest takes, and so does a step."""
    return max(of_ranks, key=lambda costs: sum(sum(line.seconds) for line in costs.operations.values()))


def _measured(_: int) -> RankCosts:
    ranks = torch.distributed.get_world_size()
    with Mesh({"data": ranks}) as mesh:
        times = operation_times(Meet(mesh.data))
        messages = {verb: _message_line(mesh, verb) for verb in VERBS}
        meeting, (slows, slowed) = _meeting(mesh), _contention(mesh)
    return RankCosts(
        **times, messages=messages, meeting=meeting, host={}, slows_compute=slows, slowed_by_compute=slowed
    )


def _measured_alone(rank: int) -> RankCosts | None:
    if rank:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(min(before * torch.distributed.get_world_size(), num_cores()))
    try:
        times = operation_times(Meet(None))
    finally:
        torch.set_num_threads(before)
    return RankCosts(**times, messages={}, meeting=0.0, host={}, slows_compute=0.0, slowed_by_compute=0.0)


def _buffers(mesh: Mesh, verb: str, num_bytes: int) -> Callable[[], Pending]:
    comm = mesh.data
    numel = num_bytes // 4 // comm.num_ranks * comm.num_ranks
    buffer, chunk = torch.zeros(numel), torch.zeros(numel // comm.num_ranks)
    return {
        "all_reduce": lambda: comm.all_reduce(buffer),
        "reduce_scatter": lambda: comm.reduce_scatter(buffer, chunk),
        "all_gather": lambda: comm.all_gather(buffer, chunk),
    }[verb]


def _message_line(mesh: Mesh, verb: str) -> Line:
    seconds = []
    for num_bytes in MESSAGE_BYTES:
        send = _buffers(mesh, verb, num_bytes)
        send().wait()  # the first one makes connections
        seconds.append(median(_seconds(mesh, lambda send=send: send().wait()) for _ in range(READINGS)))  # type: ignore[misc]
    return Line([float(size) for size in MESSAGE_BYTES], seconds)


def _seconds(mesh: Mesh, call: Callable[[], object]) -> float:
    mesh.data.barrier().wait()
    began = perf_counter()
    call()
    return perf_counter() - began


def _meeting(mesh: Mesh) -> float:
    """By how much a message that ranks wait for, after a while of compute, takes longer than both of them alone.

    Ranks come at different moments, and one that has waited first has to get a core again.
    """
    left, right, send = torch.randn(256, 256), torch.randn(256, 256), _buffers(mesh, "all_reduce", 2**12)

    def turns(computes: bool, sends: bool) -> float:
        mesh.data.barrier().wait()
        began = perf_counter()
        for _ in range(20):
            if computes:
                _products(left, right, 4)
            if sends:
                send().wait()
        mesh.data.barrier().wait()
        return (perf_counter() - began) / 20

    # In turns: a machine that is slower for a second is so for all three.
    return max(0.0, median(
        turns(True, True) - turns(True, False) - turns(False, True) for _ in range(READINGS)
    ))  # fmt: skip


def _contention(mesh: Mesh) -> tuple[float, float]:
    """By how much compute, and by how much a message, takes longer beside the other."""
    left, right, send = torch.randn(256, 256), torch.randn(256, 256), _buffers(mesh, "all_reduce", 2**24)
    message = median(_seconds(mesh, lambda: send().wait()) for _ in range(READINGS))
    compute = median(_seconds(mesh, lambda: _products(left, right, 200)) / 200 for _ in range(READINGS))
    both, each = [], []
    for _ in range(READINGS):
        mesh.data.barrier().wait()
        began, pending, count = perf_counter(), send(), 0
        while not pending.has_ended:
            _products(left, right, 2)
            count += 2
        both.append(perf_counter() - began)
        each.append(both[-1] / max(1, count))
        pending.wait()
    return max(0.0, median(each) / compute - 1), max(0.0, median(both) / message - 1)


def _products(left: Tensor, right: Tensor, count: int) -> None:
    for _ in range(count):
        left @ right
