"""Measures what this machine's ranks take for operations and messages, in under two minutes."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.comm.mesh import Mesh
from shardlab.installed import __version__
from shardlab.launch import RankPool
from shardlab.launch.pool import num_cores
from shardlab.planner.machine import Line, Machine, RankCosts

DIMS = (8, 32, 128, 512)  # smallest dims of products
ROWS = (64, 256, 1024)
BYTES = tuple(2**power for power in range(12, 27, 2))  # 4 KiB to 64 MiB
MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
LEAST_SECONDS, TURNS = 0.01, 5
VERBS = ("all_reduce", "reduce_scatter", "all_gather")


def calibrate(ranks: Sequence[int] = (2, 3, 4), on_progress: Callable[[str], None] = lambda _: None) -> Machine:
    """What this machine's ranks take; nothing else should run meanwhile.

    Args:
        ranks: numbers of ranks that are measured, besides one with the threads of all.
        on_progress: told what is measured next.
    """
    found = {}
    for count in ranks:
        on_progress(f"{count} ranks")
        with RankPool(count, device="cpu") as pool:
            found[str(count)] = _slowest(pool.run(_measured))
            if "single" not in found:
                on_progress("one rank with the cores of all")
                found["single"] = pool.run(_measured_alone)[0]
    return Machine(platform.node(), {"torch": torch.__version__, "shardlab": __version__}, num_cores(), found)


def _slowest(of_ranks: Sequence[RankCosts]) -> RankCosts:
    """Messages take what the slowest takes, and so does a step."""
    return max(of_ranks, key=lambda costs: sum(sum(line.seconds) for line in costs.operations.values()))


def _measured(rank: int) -> RankCosts:
    ranks = torch.distributed.get_world_size()
    with Mesh({"data": ranks}) as mesh:
        meet = lambda: mesh.data.barrier().wait()  # noqa: E731
        compute = _compute_costs(meet)
        messages = {verb: _messages(mesh, verb) for verb in VERBS}
        slows, slowed = _contention(mesh)
    return RankCosts(**compute, messages=messages, slows_compute=slows, slowed_by_compute=slowed)


def _measured_alone(rank: int) -> RankCosts | None:
    if rank:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(min(before * torch.distributed.get_world_size(), num_cores()))
    try:
        nothing = {"all_reduce": Line([1.0, 2.0], [1e-9, 1e-9])}
        return RankCosts(**_compute_costs(lambda: None), messages=nothing, slows_compute=0.0, slowed_by_compute=0.0)
    finally:
        torch.set_num_threads(before)


def _compute_costs(meet: Callable[[], object]) -> dict[str, Any]:
    floor = _floor(meet)
    products = {}
    for dim in DIMS:
        sizes, seconds = [], []
        for rows in ROWS:
            for wide in (256, 1024):
                left, right = torch.randn(rows, dim), torch.randn(dim, wide)
                sizes.append(2.0 * rows * dim * wide)
                seconds.append(_timed(lambda left=left, right=right: left @ right, meet))
        products[str(dim)] = _line(sizes, seconds)
    operations = {name: _operation(make, meet) for name, make in OPERATIONS.items()}
    return {"floor": floor, "products": products, "operations": operations}


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    by_size: dict[float, list[float]] = {}
    for size, one in zip(sizes, seconds, strict=True):
        by_size.setdefault(size, []).append(one)
    ordered = sorted(by_size)
    return Line(ordered, [median(by_size[size]) for size in ordered])


def _timed(call: Callable[[], object], meet: Callable[[], object]) -> float:
    """Median seconds of a call, all ranks at once."""
    call()
    began = perf_counter()
    call()
    count = max(1, min(1000, int(LEAST_SECONDS / TURNS / max(1e-7, perf_counter() - began))))
    times = []
    for _ in range(TURNS):
        meet()
        began = perf_counter()
        for _ in range(count):
            call()
        times.append((perf_counter() - began) / count)
    return median(times)


def _elementwise(function: Callable[..., object], inputs: int = 1) -> Callable[[int], tuple[Callable[[], object], int]]:
    def made(num_bytes: int) -> tuple[Callable[[], object], int]:
        numel = max(64, num_bytes // 4 // (inputs + 1) // 64 * 64)
        given = [torch.rand(numel // 64, 64) + 0.1 for _ in range(inputs)]
        return lambda: function(*given), 4 * numel * (inputs + 1)

    return made


_aten = torch.ops.aten
OPERATIONS: Mapping[str, Callable[[int], tuple[Callable[[], object], int]]] = {
    "add": _elementwise(torch.add, 2),
    "copy_": _elementwise(lambda x: x.clone()),
    "gelu": _elementwise(nn.functional.gelu),
    "gelu_backward": _elementwise(lambda g, x: _aten.gelu_backward(g, x), 2),
    "tanh": _elementwise(torch.tanh),
    "exp": _elementwise(torch.exp),
    "sqrt": _elementwise(torch.sqrt),
    "_softmax": _elementwise(lambda x: torch.softmax(x, -1)),
    "_softmax_backward_data": _elementwise(lambda g, x: _aten._softmax_backward_data(g, x, -1, torch.float32), 2),
    "_log_softmax": _elementwise(lambda x: torch.log_softmax(x, -1)),
    "native_layer_norm": _elementwise(lambda x: nn.functional.layer_norm(x, (64,))),
    "sum": _elementwise(lambda x: x.sum(0)),
}


def _operation(make: Callable[[int], tuple[Callable[[], object], int]], meet: Callable[[], object]) -> Line:
    made = [make(num_bytes) for num_bytes in BYTES]
    return _line([float(size) for _, size in made], [_timed(call, meet) for call, _ in made])


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _floor(meet: Callable[[], object]) -> float:
    """Seconds of an operation that has next to nothing to do, with autograd."""
    chain = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.GELU())))
    x = torch.randn(4, 4)

    def step() -> None:
        chain(x).sum().backward()

    with (counted := _Count()):
        step()
    return _timed(step, meet) / counted.count


def _buffers(mesh: Mesh, verb: str, num_bytes: int) -> Callable[[], Any]:
    comm = mesh.data
    numel = num_bytes // 4 // comm.num_ranks * comm.num_ranks
    buffer, chunk = torch.zeros(numel), torch.zeros(numel // comm.num_ranks)
    return {
        "all_reduce": lambda: comm.all_reduce(buffer),
        "reduce_scatter": lambda: comm.reduce_scatter(buffer, chunk),
        "all_gather": lambda: comm.all_gather(buffer, chunk),
    }[verb]


def _messages(mesh: Mesh, verb: str) -> Line:
    seconds = []
    for num_bytes in MESSAGE_BYTES:
        send = _buffers(mesh, verb, num_bytes)
        # As many calls on all ranks, which a count by time would not be.
        times = []
        for _ in range(7):
            mesh.data.barrier().wait()
            began = perf_counter()
            send().wait()
            times.append(perf_counter() - began)
        seconds.append(median(times))
    return Line([float(size) for size in MESSAGE_BYTES], seconds)


def _contention(mesh: Mesh) -> tuple[float, float]:
    """By how much compute, and by how much a message, takes longer beside the other."""
    left, right, send = torch.randn(256, 256), torch.randn(256, 256), _buffers(mesh, "all_reduce", 2**22)
    comm, compute_alone, message_alone, compute_beside, message_beside = mesh.data, [], [], [], []
    for _ in range(7):
        comm.barrier().wait()
        began = perf_counter()
        send().wait()
        message_alone.append(perf_counter() - began)
    calls = max(4, int(3 * median(message_alone) / _timed(lambda: left @ right, lambda: None)))
    calls = int(torch.tensor([calls]).item())
    for _ in range(5):
        comm.barrier().wait()
        began = perf_counter()
        _products(left, right, 200)
        compute_alone.append((perf_counter() - began) / 200)
    for _ in range(5):
        comm.barrier().wait()
        began = perf_counter()
        pending, count = send(), 0
        while not _ended(pending):
            _products(left, right, 2)
            count += 2
        compute_beside.append((perf_counter() - began) / count)
        message_beside.append(perf_counter() - began)
        pending.wait()
    slows = median(compute_beside) / median(compute_alone) - 1
    slowed = median(message_beside) / median(message_alone) - 1
    return max(0.0, slows), max(0.0, slowed)


def _ended(pending: Any) -> bool:
    return pending._event.end_ns == pending._event.end_ns  # NaN until then


def _products(left: Tensor, right: Tensor, count: int) -> None:
    for _ in range(count):
        left @ right
