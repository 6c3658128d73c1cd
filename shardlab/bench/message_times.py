"""How long messages take between ranks that all work at once, and by how much compute and messages slow each other."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from shardlab.bench.operation_times import Effort
from shardlab.comm import Pending
from shardlab.comm.mesh import Mesh
from shardlab.forecast.machine import Line

MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
VERBS = ("all_reduce", "reduce_scatter", "all_gather")
# Fields of ``RankCosts`` that ``message_time`` measures, with the names in them; contention is two of its fields.
MESSAGE_PARTS = (*(("messages", verb) for verb in VERBS), ("meeting", ""), ("contention", ""))


def message_time(field: str, name: str, mesh: Mesh, effort: Effort) -> Line | float | tuple[float, float]:
    """One of ``MESSAGE_PARTS``; collective."""
    if field == "messages":
        return _line(mesh, name, effort)
    return (_meeting if field == "meeting" else _contention)(mesh, effort)


def _buffers(mesh: Mesh, verb: str, num_bytes: int) -> Callable[[], Pending]:
    comm = mesh.data
    numel = num_bytes // 4 // comm.num_ranks * comm.num_ranks
    buffer, chunk = torch.zeros(numel), torch.zeros(numel // comm.num_ranks)
    return {
        "all_reduce": lambda: comm.all_reduce(buffer),
        "reduce_scatter": lambda: comm.reduce_scatter(buffer, chunk),
        "all_gather": lambda: comm.all_gather(buffer, chunk),
    }[verb]


def _line(mesh: Mesh, verb: str, effort: Effort) -> Line:
    seconds = []
    for num_bytes in MESSAGE_BYTES:
        send = _buffers(mesh, verb, num_bytes)
        send().wait()  # the first one makes connections
        seconds.append(median(_seconds(mesh, lambda send=send: send().wait()) for _ in range(effort.readings)))  # type: ignore[misc]
    return Line([float(size) for size in MESSAGE_BYTES], seconds)


def _seconds(mesh: Mesh, call: Callable[[], object]) -> float:
    mesh.data.barrier().wait()
    began = perf_counter()
    call()
    return perf_counter() - began


def _meeting(mesh: Mesh, effort: Effort) -> float:
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
        turns(True, True) - turns(True, False) - turns(False, True) for _ in range(effort.readings)
    ))  # fmt: skip


def _contention(mesh: Mesh, effort: Effort) -> tuple[float, float]:
    """By how much compute, and by how much a message, takes longer beside the other."""
    left, right, send = torch.randn(256, 256), torch.randn(256, 256), _buffers(mesh, "all_reduce", 2**24)
    message = median(_seconds(mesh, lambda: send().wait()) for _ in range(effort.readings))
    compute = median(_seconds(mesh, lambda: _products(left, right, 200)) / 200 for _ in range(effort.readings))
    both, each = [], []
    for _ in range(effort.readings):
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
