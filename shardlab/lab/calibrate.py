"""Measures what this machine's ranks take for operations and messages, in under two minutes."""

import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.comm.communicator import Communicator
from shardlab.comm.mesh import Mesh
from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.forecast import forecast_step, seconds_in, steered_by
from shardlab.experiment.workload import Workload
from shardlab.installed import __version__
from shardlab.launch import RankPool
from shardlab.launch.pool import num_cores
from shardlab.planner.machine import Line, Machine, RankCosts
from shardlab.planner.setup import STRATEGIES

SHAPES = (  # rows, inner and columns of products
    (64, 128, 512), (256, 128, 128), (256, 128, 512), (256, 512, 128), (1024, 128, 128), (1024, 128, 512),
    (1024, 512, 128), (1024, 512, 512), (2048, 512, 2048), (256, 32, 256), (1024, 16, 512),
)  # fmt: skip
ATTENTIONS = ((2, 4, 64, 32), (16, 4, 64, 32), (4, 4, 256, 32))  # sequences, heads, tokens, features
BYTES = tuple(2**power for power in range(12, 26, 2))  # 4 KiB to 16 MiB
MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
RING_BYTES, MOST_IN_RING = 2**26, 64  # what an operation reads was last used long ago, as in a training step
LEAST_SECONDS, TURNS = 0.02, 3  # of a reading: longer than the slices of time in which ranks share a core
VERBS = ("all_reduce", "reduce_scatter", "all_gather")
Ring = list[tuple[Tensor, ...]]


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
            found[str(count)] = _with_host(pool, count, _slowest(pool.run(_measured)))
            if "single" not in found:
                on_progress("one rank with the cores of all")
                found["single"] = pool.run(_measured_alone)[0]
    return Machine(platform.node(), {"torch": torch.__version__, "shardlab": __version__}, num_cores(), found)


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


def _slowest(of_ranks: Sequence[RankCosts]) -> RankCosts:
    """Messages take what the slowest takes, and so does a step."""
    return max(of_ranks, key=lambda costs: sum(sum(line.seconds) for line in costs.operations.values()))


def _measured(rank: int) -> RankCosts:
    ranks = torch.distributed.get_world_size()
    with Mesh({"data": ranks}) as mesh:
        compute = _compute_costs(Meet(mesh.data))
        messages = {verb: _messages(mesh, verb) for verb in VERBS}
        meeting = _meeting(mesh)
        slows, slowed = _contention(mesh)
    return RankCosts(
        **compute, messages=messages, meeting=meeting, host={}, slows_compute=slows, slowed_by_compute=slowed
    )  # fmt: skip


def _measured_alone(rank: int) -> RankCosts | None:
    if rank:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(min(before * torch.distributed.get_world_size(), num_cores()))
    try:
        nothing = {"all_reduce": Line([1.0, 2.0], [1e-9, 1e-9])}
        return RankCosts(
            **_compute_costs(Meet(None)), messages=nothing, meeting=0.0, host={}, slows_compute=0.0, slowed_by_compute=0.0
        )
    finally:
        torch.set_num_threads(before)


def _compute_costs(meet: "Meet") -> dict[str, Any]:
    products: dict[str, list[tuple[float, float]]] = {"forward": [], "input": [], "weight": []}
    for rows, inner, columns in SHAPES:
        flops = 2.0 * rows * inner * columns
        for form, make in PRODUCTS.items():
            products[form].append((flops, _timed(*make(rows, inner, columns), meet)))
    attention: dict[str, list[tuple[float, float]]] = {"attention": [], "attention_backward": []}
    for shape in ATTENTIONS:
        for form, times in attention.items():
            flops = 4.0 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
            times.append((flops * (2.5 if "backward" in form else 1.0), _timed(*_attention(form, shape), meet)))
    operations = {name: _operation(make, meet) for name, make in OPERATIONS.items()}
    return {
        "floors": _floors(meet), "products": {name: _line(times) for name, times in (products | attention).items()},
        "operations": operations,
    }  # fmt: skip


def _forward(rows: int, inner: int, columns: int) -> tuple[Callable[..., Tensor], Ring]:
    return lambda x, w, b: torch.addmm(b, x, w.t()), _ring(lambda: (torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)))


def _input(rows: int, inner: int, columns: int) -> tuple[Callable[..., Tensor], Ring]:
    return torch.mm, _ring(lambda: (torch.randn(rows, inner), torch.randn(inner, columns)))


def _weight(rows: int, inner: int, columns: int) -> tuple[Callable[..., Tensor], Ring]:
    return lambda g, x: g.t() @ x, _ring(lambda: (torch.randn(rows, inner), torch.randn(rows, columns)))


PRODUCTS = {"forward": _forward, "input": _input, "weight": _weight}


def _ring(make: Callable[[], tuple[Tensor, ...]]) -> Ring:
    first = make()
    size = sum(tensor.nbytes for tensor in first)
    return [first, *(make() for _ in range(min(MOST_IN_RING, max(2, RING_BYTES // size)) - 1))]


def _attention(form: str, shape: tuple[int, int, int, int]) -> tuple[Callable[..., object], Ring]:
    sequences, heads, tokens, features = shape

    def heads_of() -> Tensor:  # as a projection gives them: the heads of a token side by side
        return torch.randn(sequences, tokens, heads, features).transpose(1, 2)

    forward = _aten._scaled_dot_product_flash_attention_for_cpu
    if form == "attention":
        return lambda q, k, v: forward(q, k, v, 0.0, True), _ring(lambda: (heads_of(), heads_of(), heads_of()))

    def kept() -> tuple[Tensor, ...]:
        q, k, v = heads_of(), heads_of(), heads_of()
        return heads_of(), q, k, v, *forward(q, k, v, 0.0, True)

    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda g, q, k, v, out, sums: backward(g, q, k, v, out, sums, 0.0, True), _ring(kept)


def _line(times: Sequence[tuple[float, float]]) -> Line:
    by_size: dict[float, list[float]] = {}
    for size, seconds in times:
        by_size.setdefault(size, []).append(seconds)
    ordered = sorted(by_size)
    return Line(ordered, [median(by_size[size]) for size in ordered])


def _timed(function: Callable[..., object], ring: Ring, meet: "Meet") -> float:
    """Median seconds of a call on each of the ranks, all at once, until the last has ended."""
    kept: list[object] = [function(*given) for given in ring]  # results too lie where nobody has just been
    began = perf_counter()
    kept[0] = function(*ring[0])
    count = meet.largest(max(1, min(2000, int(LEAST_SECONDS / max(1e-7, perf_counter() - began)))))
    times = []
    for _ in range(TURNS):
        meet.all()
        began = perf_counter()
        for number in range(count):
            place = number % len(ring)
            kept[place] = function(*ring[place])
        meet.all()
        times.append((perf_counter() - began) / count)
    return median(times)


class Meet:
    """Where ranks wait for each other.

    Args:
        comm: of all of them; None for one alone.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def all(self) -> None:
        """Return when all have come."""
        if self._comm is not None:
            self._comm.barrier().wait()

    def largest(self, count: int) -> int:
        """The largest of all ranks' counts."""
        found = torch.tensor([count])
        if self._comm is not None:
            self._comm.all_reduce(found, reduction="max").wait()
        return int(found.item())


def _elementwise(function: Callable[..., object], inputs: int = 1) -> Callable[[int], tuple[Any, Ring, int]]:
    def made(num_bytes: int) -> tuple[Any, Ring, int]:
        rows = max(1, num_bytes // 4 // (inputs + 1) // 64)
        ring = _ring(lambda: tuple(torch.rand(rows, 64) + 0.1 for _ in range(inputs)))
        return function, ring, 4 * 64 * rows * (inputs + 1)

    return made


_aten = torch.ops.aten
OPERATIONS: Mapping[str, Callable[[int], tuple[Any, Ring, int]]] = {
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


def _operation(make: Callable[[int], tuple[Any, Ring, int]], meet: "Meet") -> Line:
    made = [make(num_bytes) for num_bytes in BYTES]
    return _line([(float(size), _timed(function, ring, meet)) for function, ring, size in made])


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _floors(meet: "Meet") -> dict[str, float]:
    """Seconds of an operation that has next to nothing to do: in forward, in backward, and in an optimizer."""
    chain = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.GELU())))
    x, optimizer = torch.randn(4, 4), torch.optim.AdamW(chain.parameters())

    def both() -> None:
        chain(x).sum().backward()

    both()
    counts, seconds = {}, {}
    for name, call in {"forward": lambda: chain(x).sum(), "backward": both, "optimizer": optimizer.step}.items():
        with _Count() as counted:
            call()
        counts[name], seconds[name] = counted.count, _timed(call, [()], meet)
    counts["backward"] -= counts["forward"]
    seconds["backward"] -= seconds["forward"]
    return {name: seconds[name] / counts[name] for name in counts}


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

    both, compute, message = (median(turns(*what) for _ in range(5)) for what in ((1, 1), (1, 0), (0, 1)))
    return max(0.0, both - compute - message)


def _contention(mesh: Mesh) -> tuple[float, float]:
    """By how much compute, and by how much a message, takes longer beside the other."""
    left, right, send = torch.randn(256, 256), torch.randn(256, 256), _buffers(mesh, "all_reduce", 2**22)
    comm, compute_alone, message_alone, compute_beside, message_beside = mesh.data, [], [], [], []
    for _ in range(7):
        comm.barrier().wait()
        began = perf_counter()
        send().wait()
        message_alone.append(perf_counter() - began)
    calls = max(4, int(3 * median(message_alone) / _timed(lambda: left @ right, [()], Meet(None))))
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
