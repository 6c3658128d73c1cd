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
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

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


class Device(Protocol):
    """A card that takes time; all seconds are those of one call, with the card warm."""

    name: str
    memory_bytes: float
    multiprocessors: int
    precisions: Sequence[str]
    """Of ``ITEMSIZES``, those that it computes in; the first has 16 bits."""

    def product(self, precision: str, rows: int, inner: int, columns: int) -> float:
        """Seconds of a matrix product."""

    def attention(self, precision: str, sequences: int, heads: int, tokens: int, dim: int) -> float:
        """Seconds of causal attention in one kernel, forward and backward."""

    def copy(self, num_bytes: int) -> float:
        """Seconds of a copy on the card."""

    def host_copy(self, num_bytes: int) -> float:
        """Seconds of a copy between the card and pinned memory of the host, in the slower direction."""

    def launches(self, kind: str) -> tuple[float, int]:
        """Seconds of the host for a pass of tiny kernels, eager, compiled or graph, and how many kernels that is."""


@dataclass(frozen=True)
class CardTimes:
    """What was measured: a card, and how far products of single shapes are from what is forecast of them."""

    gpu: Gpu
    worst_product: float


def calibrate_card(device: Device, on_progress: Callable[[str], None] = lambda _: None) -> CardTimes:
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
    host = {kind: done(f"launches, {kind}", _each(*device.launches(kind))) for kind in LAUNCHES}
    of_peak = "the maker's peaks" if known.peaks else "peaks are the largest rates that were measured"
    gpu = replace(
        known, name=f"{known.name}, measured", source=f"measured on {device.name}; {of_peak}", peaks=peaks,
        multiprocessors=device.multiprocessors, memory_bandwidth=bandwidth, memory_fraction=moved / bandwidth,
        product_fraction=fractions[first], product_fractions=fractions,
        attention_fraction=attention / peaks[first] / attention_share(dim, tokens), host_seconds=host,
    )  # fmt: skip
    return CardTimes(gpu, max(abs(rate / median(of) - 1) for of in rates.values() for rate in of))


def _known(device: Device, copied: float) -> Gpu:
    """What the table has of a card; of one without peaks what is usual, and its link by the bytes a second copied."""
    known = named(device.name)
    if known is not None and known.peaks:
        return known
    name, link = (device.name, Link(10.0, 8e-9 * copied)) if known is None else (known.name, known.link)
    inside = "pcie5" if copied > FAST_COPY else "pcie4"
    return Gpu(device.memory_bytes, link, name, inside=inside, between_gigabits=25.0, contention=0.189)


def parts(device: Device) -> Iterator[str]:
    """What is measured, in its order."""
    yield from ("memory", "host copies")
    yield from (f"products, {name}" for name in device.precisions)
    yield "attention"
    yield from (f"launches, {kind}" for kind in LAUNCHES)


def _rates(device: Device, precision: str, bandwidth: float, on_progress: Callable[[str], None]) -> Iterator[float]:
    """FLOP a second of the main loop of each product: without its tail, and the way of its result to memory."""
    for rows, inner, columns in SHAPES:
        written = rows * columns * ITEMSIZES[precision] / bandwidth
        seconds = device.product(precision, rows, inner, columns) - written
        yield 2.0 * rows * inner * columns * with_tail(rows, inner, columns, device.multiprocessors) / seconds
    on_progress(f"products, {precision}")


def _attention_flops() -> float:
    sequences, heads, tokens, dim = ATTENTION
    return 3.5 * 4 * sequences * heads * tokens**2 * dim / 2


def _each(seconds: float, kernels: int) -> float:
    return seconds / kernels
