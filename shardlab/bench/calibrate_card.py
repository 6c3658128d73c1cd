"""Measures one card for forecasts: what it reaches of its peaks, and what its host takes to launch a kernel.

======================  ============================================================================================
field of ``Gpu``        from the seconds t of
======================  ============================================================================================
product_fractions       products of eight shapes, by precision: FLOPs with the tail of tiles / (t - bytes of the result
                        / bandwidth) / peak, the median; a step sustains less, as of every card (``SUSTAINED``)
attention_fraction      attention of long rows, forward and backward: FLOPs / t / peak / the factors of its shape
memory_fraction         a copy on the card: bytes read and written / t / the maker's bandwidth
host_seconds            passes of tiny layers, launched eagerly, compiled, and as a graph: t / kernels
link                    a copy from or to the host, the slower of both, of a card that is not in the table
======================  ============================================================================================

A card that is not in the table, or has no peaks there, gets the largest rate that was measured as its peak. What one
card cannot say stays as the table has it: links between cards, contention, products in 8 bits.

A test measures other cards than ``CudaCard``, whose seconds are told.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardlab.forecast.transformer import attention_share, with_tail
from shardlab.partition.ring_cost import Link
from shardlab.planner.gpu import Gpu, named

SHAPES = (  # rows, inner and columns of products of layers of 7 and 13 billion parameters
    (4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 12288), (8192, 4096, 16384), (8192, 16384, 4096),
    (8192, 5120, 5120), (8192, 5120, 13824), (8192, 8192, 8192),
)  # fmt: skip
ATTENTION = (1, 32, 8192, 128)  # sequences, heads, tokens, elements of a head
ITEMSIZES = {"bf16": 2, "fp16": 2, "tf32": 4}
LAUNCHES = ("eager", "compiled", "graph")
COPY_BYTES, HOST_BYTES = 2**30, 2**28
FAST_COPY = 30e9  # bytes a second from and to the host that PCIe 4 does not reach
WARM_S, READ_S = 0.2, 0.2  # for how long something is run before it is read, and while
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
DEPTH, WIDTH = 24, 64  # of the layers whose kernels have next to nothing to do


class CudaCard:
    """The first card that torch sees. All seconds are those of one call, with the card warm.

    Attributes:
        name: as the driver has it.
        memory_bytes: of the card.
        multiprocessors: how many it has.
        precisions: of ``ITEMSIZES``, those that it computes in; the first has 16 bits.

    Raises:
        ValueError: there is none.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                f"device: cuda is given, and torch {torch.__version__} sees no GPU here; run this on the machine that "
                "has the card, or leave --device out to calibrate this machine's CPU"
            )
        found = torch.cuda.get_device_properties(0)
        self.name, self.memory_bytes = str(found.name), float(found.total_memory)
        self.multiprocessors = int(found.multi_processor_count)
        # Before Ampere 16 bits are those of fp16, and 32 have no tensor cores.
        self.precisions: Sequence[str] = ("bf16", "fp16", "tf32") if found.major >= 8 else ("fp16",)

    def product(self, precision: str, rows: int, inner: int, columns: int) -> float:
        """Seconds of a matrix product."""
        left, right = (
            torch.randn(*shape, device="cuda", dtype=DTYPES[precision]) for shape in ((rows, inner), (inner, columns))
        )
        # Not allow_tf32, which torch refuses to read beside this one.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            return _seconds(lambda: left @ right)
        finally:
            torch.set_float32_matmul_precision(before)

    def attention(self, precision: str, sequences: int, heads: int, tokens: int, dim: int) -> float:
        """Seconds of causal attention in one kernel, forward and backward."""
        shape = (sequences, heads, tokens, dim)
        q, k, v = (
            torch.randn(*shape, device="cuda", dtype=DTYPES[precision], requires_grad=True) for _ in range(3)
        )  # fmt: skip
        given = torch.randn(*shape, device="cuda", dtype=DTYPES[precision])

        def both() -> None:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), given)

        return _seconds(both)

    def copy(self, num_bytes: int) -> float:
        """Seconds of a copy on the card."""
        source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return _seconds(lambda: target.copy_(source))

    def host_copy(self, num_bytes: int) -> float:
        """Seconds of a copy between the card and pinned memory of the host, in the slower direction."""
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(here, device="cuda")
        return max(_seconds(lambda: there.copy_(here, non_blocking=True)), _seconds(lambda: here.copy_(there)))

    def launches(self, kind: str) -> tuple[float, int]:
        """Seconds of the host for a pass of tiny kernels, eager, compiled or graph, and how many kernels that is."""
        layers = (layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        model = nn.Sequential(*layers).cuda()
        x = torch.randn(WIDTH, WIDTH, device="cuda")
        run = torch.compile(model) if kind == "compiled" else model

        def both() -> None:
            torch.autograd.grad(run(x).sum(), tuple(model.parameters()))

        call = _as_graph(both) if kind == "graph" else both
        return _seconds(call), _kernels(call)


def _as_graph(call: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the parameters may still be on their way
    with torch.cuda.stream(side):  # a capture needs what a first call makes, on a stream of its own
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _kernels(call: Callable[[], object]) -> int:
    """How many kernels a call launches.

    Raises:
        RuntimeError: the profiler sees none, as where a container may not use it.
    """
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    if not (count := sum(str(event.device_type).endswith("CUDA") for event in seen.events())):
        raise RuntimeError("the profiler sees no kernel")
    return count


def _seconds(call: Callable[[], object]) -> float:
    """Of a call in a row of calls, until the card has done them all."""
    _in_a_row(call, WARM_S)
    return _in_a_row(call, READ_S)


def _in_a_row(call: Callable[[], object], at_least: float) -> float:
    """Seconds of a call, by as many as take so long; the host runs ahead of the card, and waits at the end alone."""
    count = 1
    while True:
        torch.cuda.synchronize()
        began = perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        took = perf_counter() - began
        if took >= at_least:
            return took / count
        count = max(2 * count, int(1.2 * count * at_least / max(took, 1e-6)))


@dataclass(frozen=True)
class CardTimes:
    """What was measured: a card, and how far products of single shapes are from what is forecast of them.

    ``failed`` has the ways to launch that did not run, with the reason: what is usual is taken for them.
    """

    gpu: Gpu
    worst_product: float
    failed: Mapping[str, str]


def calibrate_card(device: CudaCard, on_progress: Callable[[str], None] = lambda _: None) -> CardTimes:
    """Measure a card; ``on_progress`` is told each of ``parts`` when it is done."""

    def done(part: str, value: float) -> float:
        on_progress(part)
        return value

    moved = done("memory", 2 * COPY_BYTES / device.copy(COPY_BYTES))
    known = _known(device, done("host copies", HOST_BYTES / device.host_copy(HOST_BYTES)))
    rates = {name: [*_rates(device, name, moved, on_progress)] for name in device.precisions}
    # The maker's peaks, where they are known, since MFU is counted against them.
    peaks = {**{name: max(of) for name, of in rates.items()}, **known.peaks}
    first, bandwidth = device.precisions[0], known.memory_bandwidth or moved
    fractions = {name: median(of) / peaks[name] for name, of in rates.items()}
    attention = done("attention", _attention_flops() / device.attention(first, *ATTENTION))
    _, _, tokens, dim = ATTENTION
    host, failed = dict[str, float](), dict[str, str]()
    for kind in LAUNCHES:  # what was measured before is kept where there is no compiler, or a capture is refused
        try:
            seconds, kernels = device.launches(kind)
            host[kind] = seconds / kernels
        except RuntimeError as error:
            failed[kind] = f"{type(error).__name__}: {error}".splitlines()[0]
        on_progress(f"launches, {kind}")
    of_peak = "the maker's peaks" if known.peaks else "peaks are the largest rates that were measured"
    gpu = replace(
        known, name=f"{known.name}, measured", source=f"measured on {device.name}; {of_peak}", peaks=peaks,
        multiprocessors=device.multiprocessors, memory_bandwidth=bandwidth, memory_fraction=moved / bandwidth,
        product_fraction=fractions[first], product_fractions=fractions,
        attention_fraction=attention / peaks[first] / attention_share(dim, tokens), host_seconds=host,
    )  # fmt: skip
    return CardTimes(gpu, max(abs(rate / median(of) - 1) for of in rates.values() for rate in of), failed)


def _known(device: CudaCard, copied: float) -> Gpu:
    """What the table has of a card; of one without peaks what is usual, and its link by the bytes a second copied."""
    known = named(device.name)
    if known is not None and known.peaks:
        return known
    name, link = (device.name, Link(10.0, 8e-9 * copied)) if known is None else (known.name, known.link)
    inside = "pcie5" if copied > FAST_COPY else "pcie4"
    return Gpu(device.memory_bytes, link, name, inside=inside, between_gigabits=25.0, contention=0.189)


def parts(device: CudaCard) -> Iterator[str]:
    """What is measured, in its order."""
    yield from ("memory", "host copies")
    yield from (f"products, {name}" for name in device.precisions)
    yield "attention"
    yield from (f"launches, {kind}" for kind in LAUNCHES)


def _rates(device: CudaCard, precision: str, bandwidth: float, on_progress: Callable[[str], None]) -> Iterator[float]:
    """FLOP a second of the main loop of each product: without its tail, and the way of its result to memory."""
    for rows, inner, columns in SHAPES:
        written = rows * columns * ITEMSIZES[precision] / bandwidth
        seconds = device.product(precision, rows, inner, columns) - written
        yield 2.0 * rows * inner * columns * with_tail(rows, inner, columns, device.multiprocessors) / seconds
    on_progress(f"products, {precision}")


def _attention_flops() -> float:
    sequences, heads, tokens, dim = ATTENTION
    return 3.5 * 4 * sequences * heads * tokens**2 * dim / 2
