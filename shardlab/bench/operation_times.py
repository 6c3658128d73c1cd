"""How long operations take on ranks that all work at once: products, attention, and what moves memory.

Each is read twice: with data that was last used long ago, and, where each rank has a core, with data of a moment ago.
Values are all alike, since drawing them takes longer than the reading, and no operation here takes longer for some.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public way to count operations

from shardlab.comm.communicator import Communicator
from shardlab.forecast.machine import Line
from shardlab.installed import num_cores

SHAPES = (  # rows, inner and columns of products that compute more than they move
    (64, 128, 512), (256, 128, 128), (256, 128, 512), (256, 512, 128), (1024, 128, 128), (1024, 128, 512),
    (1024, 512, 128), (1024, 512, 512), (2048, 512, 2048), (512, 64, 64), (512, 128, 128),
)  # fmt: skip
ATTENTIONS = ((2, 4, 64, 32), (16, 4, 64, 32), (4, 4, 256, 32))  # sequences, heads, tokens, features
BYTES = tuple(2**power for power in range(12, 26, 2))  # 4 KiB to 16 MiB
RING_BYTES, MOST_IN_RING = 2**26, 64
WARM = 2  # places that are used in turn where memory is warm
Ring = list[tuple[Tensor, ...]]
Made = tuple[Callable[..., object], Ring]


@dataclass(frozen=True)
class Effort:
    """How often something is measured.

    Attributes:
        least_seconds: of a reading: by default longer than the slices of time in which ranks share a core.
        turns: readings of an operation, of which the median counts.
        readings: of a message likewise.
        short_steps: of the training of a tiny model.
        long_steps: of the training of four layers.
        every: of how many sizes of an operation one is taken.
    """

    least_seconds: float = 0.015
    turns: int = 3
    readings: int = 7
    short_steps: int = 24
    long_steps: int = 8
    every: int = 1


FULL, QUICK = Effort(), Effort(0.002, 5, 5, 8, 4, 3)


def operation_parts() -> Iterator[tuple[str, str]]:
    """Fields of ``RankCosts`` that ``operation_time`` measures, with the names in them."""
    yield "floors", ""
    yield from (("products", form) for form in (*PRODUCTS, *ATTENTION_FORMS))
    yield from (("operations", name) for name in OPERATIONS)


def operation_time(field: str, name: str, comm: Communicator, effort: Effort) -> dict[str, float] | Line:
    """One of ``operation_parts``; collective over ``comm``, which has one rank where that is alone."""
    if field == "floors":
        return _floors(comm, effort)
    if field == "operations":
        made = [OPERATIONS[name](num_bytes) for num_bytes in BYTES[:: effort.every]]
        return _line([(float(size), timed(function, ring, comm, effort)) for function, ring, size in made])
    times = []
    if name in PRODUCTS:
        for rows, inner, columns in SHAPES[:: effort.every]:
            times.append((2.0 * rows * inner * columns, timed(*PRODUCTS[name](rows, inner, columns), comm, effort)))
        return _line(times)
    for shape in ATTENTIONS[:: -effort.every]:  # of few the largest
        flops = 4.0 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
        seconds = timed(*_attention(name, shape), comm, effort)
        times.append((flops * (2.5 if "backward" in name else 1.0), seconds))
    return _line(times)


def _forward(rows: int, inner: int, columns: int) -> Made:
    def given() -> tuple[Tensor, ...]:
        return torch.ones(rows, inner), torch.ones(columns, inner), torch.ones(columns)

    return lambda x, w, b: torch.addmm(b, x, w.t()), _ring(given)


def _input(rows: int, inner: int, columns: int) -> Made:
    return torch.mm, _ring(lambda: (torch.ones(rows, inner), torch.ones(inner, columns)))


def _weight(rows: int, inner: int, columns: int) -> Made:
    return lambda g, x: g.t() @ x, _ring(lambda: (torch.ones(rows, inner), torch.ones(rows, columns)))


PRODUCTS = {"forward": _forward, "input": _input, "weight": _weight}
ATTENTION_FORMS = ("attention", "attention_backward")


def _ring(make: Callable[[], tuple[Tensor, ...]]) -> Ring:
    first = make()
    size = sum(tensor.nbytes for tensor in first)
    return [first, *(make() for _ in range(min(MOST_IN_RING, max(2, RING_BYTES // size)) - 1))]


def _attention(form: str, shape: tuple[int, int, int, int]) -> Made:
    sequences, heads, tokens, features = shape

    def heads_of() -> Tensor:  # as a projection gives them: the heads of a token side by side
        return torch.ones(sequences, tokens, heads, features).transpose(1, 2)

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


def timed(function: Callable[..., object], ring: Ring, comm: Communicator, effort: Effort) -> float:
    """Seconds of a call on each of the ranks, all at once, until the last has ended: between cold and warm memory.

    A training step reads both: what the operation before it has just written, and weights and activations of long ago.
    """
    kept: list[object] = [function(*given) for given in ring]  # results too lie where nobody has just been
    began = perf_counter()
    kept[0] = function(*ring[0])
    count = _largest(max(1, min(2000, int(effort.least_seconds / max(1e-7, perf_counter() - began)))), comm)
    cold = median(_reading(function, ring, kept, count, comm) for _ in range(effort.turns))
    # Ranks that take turns on a core take each other's cache as well.
    if len(ring) <= WARM or comm.num_ranks > num_cores():
        return cold
    warm = median(_reading(function, ring[:WARM], kept, count, comm) for _ in range(effort.turns))
    return sqrt(cold * warm)


def _reading(function: Callable[..., object], ring: Ring, kept: list[object], count: int, comm: Communicator) -> float:
    comm.barrier().wait()
    began = perf_counter()
    for number in range(count):
        place = number % len(ring)
        kept[place] = function(*ring[place])
    comm.barrier().wait()
    return (perf_counter() - began) / count


def _largest(count: int, comm: Communicator) -> int:
    """Of all ranks' counts."""
    found = torch.tensor([count])
    comm.all_reduce(found, reduction="max").wait()
    return int(found.item())


def _elementwise(function: Callable[..., object], inputs: int = 1) -> Callable[[int], tuple[Any, Ring, int]]:
    def made(num_bytes: int) -> tuple[Any, Ring, int]:
        rows = max(1, num_bytes // 4 // (inputs + 1) // 64)
        ring = _ring(lambda: tuple(torch.full((rows, 64), 0.5) for _ in range(inputs)))
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


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _floors(comm: Communicator, effort: Effort) -> dict[str, float]:
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
        counts[name], seconds[name] = counted.count, timed(call, [()], comm, effort)
    counts["backward"] -= counts["forward"]
    seconds["backward"] -= seconds["forward"]
    return {name: seconds[name] / counts[name] for name in counts}
