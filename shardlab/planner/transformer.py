"""Seconds of a transformer's layers and head on a GPU, from the shapes of its matrix products and the bytes it moves.

======================  ==============================================================================================
matrix product          FLOPs / (peak x fraction) x (1 + half a wave of tiles / its tiles) + bytes of the result
                        / bandwidth; at least the bytes of all three matrices / bandwidth; at least a launch
attention, in one       4 b s^2 h / 2 FLOPs (it is causal) forward, 2.5 times as many backward, at
kernel                  peak x fraction x s / (s + 600) x d / (d + 16)
attention, unfused      two products of the whole s x s scores, and 12 bytes a score with softmax in one kernel,
                        twice that backward (recounted once GPT 22B of the published rows was missed with 24)
memory-bound work       bytes a token below / bandwidth; backward moves twice what forward does
loss                    bytes a logit below / bandwidth
======================  ==============================================================================================

Bytes a token and layer in forward, in 16 bits; kv is the share of heads that have keys and values of their own:

====================================  ==========================================================
GPT: norm and GELU each one kernel    2 norms 8 h, 2 residuals 12 h, GELU 4 ffn
Llama, kernel by kernel               2 norms 68 h (in 32 bits), 2 residuals 12 h, rotation
                                      24 h (1 + kv), SiLU and product 10 ffn
Llama, compiled                       2 norms 8 h, 2 residuals 12 h, rotation 4 h (1 + kv), SiLU
                                      and product 6 ffn
====================================  ==========================================================

A logit costs the loss, forward and backward, 12 bytes in one kernel (GPT, compiled) and 36 otherwise. Tiles are 128 x
256, the largest that cuBLAS has for 16 bits; half a wave of them stays empty on average; an inner dim above 4096 is
split over multiprocessors. The tail of a product, its result's way to memory, overlaps with nothing.

Legend: b sequences, s tokens of a sequence, h hidden, d = h / heads. Sources: FLOPs as in arXiv 2104.04473, appendix;
arXiv 2205.14135 (bytes of attention, FlashAttention 1); arXiv 2307.08691, figures 4 to 7: the rate of attention rises
with s and d as above, and FlashAttention 2 is 1.7 to 3 times as fast as 1. Bytes a token were counted kernel by
kernel.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardlab.planner.hardware import SUSTAINED, Hardware

TILE = 128 * 256
SPLIT_INNER = 4096
ATTENTIONS = {"flash-1": 0.5, "flash-2": 1.0, "unfused": 0.0}  # rate against FlashAttention 2
PRODUCTS, ATTENTION, MEMORY, LAUNCHES = "matrix products", "attention", "memory-bound work", "launch floor"
LAUNCHED = {"gpt": 14, "llama": 40, "compiled": 14}  # kernels of a layer in forward; backward has twice as many


class Parts(dict[str, float]):
    """Seconds by what they are spent on; they add up."""

    def add(self, other: Mapping[str, float], times: float = 1.0) -> "Parts":
        """Add those of another, so many times; return self."""
        for name, seconds in other.items():
            self[name] = self.get(name, 0.0) + times * seconds
        return self

    def total(self) -> float:
        """All together."""
        return sum(self.values())


@dataclass(frozen=True)
class Shape:
    """A transformer on one rank; the arguments of ``predict_step`` of the same names."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    micro_batch: int
    tensor: int = 1
    gated: bool = False
    compiled: bool = False
    attention: str = "flash-2"

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def kv_share(self) -> float:
        """Keys and values against queries."""
        return self.kv_heads / self.heads

    @property
    def layer_params(self) -> float:
        """Elements of a layer, over all tensor ranks."""
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        return self.hidden**2 * (2 + 2 * self.kv_share) + mlp + 2 * self.hidden

    @property
    def root_params(self) -> float:
        """Elements of embedding and head; one matrix in the form of GPT, two in that of Llama."""
        return self.vocab * self.hidden * (2 if self.gated else 1)

    @property
    def written(self) -> str:
        """How the layers are written: the key of the tables above."""
        return "compiled" if self.compiled else "llama" if self.gated else "gpt"

    def products(self) -> Iterator[tuple[float, float, float]]:
        """Rows, inner and columns of a layer's matrix products on a tensor rank."""
        h, ffn, part = self.hidden, self.ffn, 1 / self.tensor
        yield self.tokens, h, h * (1 + 2 * self.kv_share) * part
        yield self.tokens, h * part, h
        yield self.tokens, h, ffn * part * (2 if self.gated else 1)
        yield self.tokens, ffn * part, h

    def token_bytes(self) -> float:
        """Bytes a token that the memory-bound work of a layer moves in forward, on a tensor rank."""
        h, ffn, heads = self.hidden, self.ffn / self.tensor, self.hidden * (1 + self.kv_share) / self.tensor
        if not self.gated:
            return 20 * h + 4 * ffn
        return 20 * h + 4 * heads + 6 * ffn if self.compiled else 80 * h + 24 * heads + 10 * ffn


class Costs:
    """Seconds of a shape on a GPU, forward or backward."""

    def __init__(self, shape: Shape, hardware: Hardware, precision: str, itemsize: int) -> None:
        self.shape, self.hardware, self.itemsize = shape, hardware, itemsize
        self.peak = hardware.peaks[precision]
        self.product_rate = self.peak * hardware.product_fraction * SUSTAINED
        self.bandwidth = hardware.memory_bandwidth * hardware.memory_fraction

    def layer(self, *, backward: bool = False) -> Parts:
        """Of one layer."""
        shape = self.shape
        moved = shape.tokens * shape.token_bytes() * self.itemsize / 2 * (2 if backward else 1)
        found = Parts({PRODUCTS: self.products(shape.products(), backward), MEMORY: moved / self.bandwidth})
        found.add(self.attention(backward))
        launches = LAUNCHED[shape.written] * (2 if backward else 1) * self.hardware.launch_seconds
        found[LAUNCHES] = max(0.0, launches - found.total())
        return found

    def head(self, *, backward: bool = False) -> Parts:
        """Of the product with the vocabulary and of the loss."""
        shape, part = self.shape, self.shape.vocab / self.shape.tensor
        a_logit = (36 if shape.written == "llama" else 12) / 3 * (2 if backward else 1)
        return Parts({
            PRODUCTS: self.products([(shape.tokens, shape.hidden, part)], backward),
            MEMORY: shape.tokens * part * a_logit / self.bandwidth,
        })  # fmt: skip

    def attention(self, backward: bool) -> Parts:
        """Of the scores, on a tensor rank; causal where one kernel makes them."""
        shape = self.shape
        flops = 4 * shape.tokens * shape.seq_len * shape.hidden / shape.tensor
        rate = ATTENTIONS[shape.attention]
        if rate:
            dim = shape.hidden / shape.heads
            rate *= self.peak * self.hardware.attention_fraction * dim / (dim + 16)
            rate *= shape.seq_len / (shape.seq_len + 600)
            return Parts({ATTENTION: flops / 2 * (2.5 if backward else 1) / rate})
        times = 2 if backward else 1
        scores = shape.tokens * shape.seq_len * shape.heads / shape.tensor
        seconds = flops / (self.product_rate) + 6 * self.itemsize * scores / self.bandwidth
        return Parts({ATTENTION: times * seconds})

    def products(self, sizes: Iterable[tuple[float, float, float]], backward: bool) -> float:
        """Of matrix products, or of those for the gradients of their inputs and of their weights."""
        if not backward:
            return sum(self.product(*size) for size in sizes)
        return sum(self.product(m, n, k) + self.product(k, m, n) for m, k, n in sizes)

    def product(self, rows: float, inner: float, columns: float) -> float:
        """Of one matrix product."""
        card, result = self.hardware, rows * columns
        tiles = max(1.0, result / TILE) * max(1.0, inner / SPLIT_INNER)
        seconds = 2 * result * inner / self.product_rate * (1 + card.multiprocessors / 2 / tiles)
        seconds += result * self.itemsize / self.bandwidth
        read = (rows * inner + inner * columns + result) * self.itemsize / self.bandwidth
        return max(seconds, read, card.launch_seconds)
