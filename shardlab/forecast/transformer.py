"""Seconds of a transformer's layers and head on a GPU, from the shapes of its matrix products and the bytes it moves.

======================  ==============================================================================================
matrix product          FLOPs / (peak x fraction) x (1 + half a wave of tiles / its tiles) + bytes of the result
                        / bandwidth; at least the bytes of all three matrices / bandwidth; at least a launch
attention, in one       4 b s^2 a / 2 FLOPs (it is causal) forward, 2.5 times as many backward, at
kernel                  peak x fraction x s / (s + 600) x d / (d + 16); a window w makes s^2 2 w s - w^2
attention, unfused      two products of the whole s x s scores, and 12 bytes a score with softmax in one kernel,
                        twice that backward (recounted once GPT 22B of the published rows was missed with 24)
attention, op by op     the same with 32 bytes a score: scaled, masked, in 32 bits, normalised, in 16 bits, and read
memory-bound work       bytes a token below / bandwidth; backward moves twice what forward does
loss                    bytes a logit below / bandwidth
products in fp8         those of layers, at 88 % of the share of the peak that 16 bits reach, and 3 bytes an element of
                        both matrices / bandwidth, which are read in 16 bits and written in 8; attention, head and all
                        that lies between stay in 16 bits
======================  ==============================================================================================

Bytes a token and layer in forward, in 16 bits; a is d times the heads (h, unless a model says d), kv the share of heads
that have keys and values of their own:

====================================  ==========================================================
GPT: norm and GELU each one kernel    2 norms 8 h, 2 residuals 12 h, GELU 4 ffn
Llama, kernel by kernel               2 norms 68 h (in 32 bits), 2 residuals 12 h, rotation
                                      24 a (1 + kv), SiLU and product 10 ffn
Llama, compiled                       2 norms 8 h, 2 residuals 12 h, rotation 4 a (1 + kv), SiLU
                                      and product 6 ffn
====================================  ==========================================================

A logit costs the loss, forward and backward, 12 bytes in one kernel (GPT, compiled) and 36 otherwise. Tiles are 128 x
256, the largest that cuBLAS has for 16 bits; half a wave of them stays empty on average; an inner dim above 4096 is
split over multiprocessors. The tail of a product, its result's way to memory, overlaps with nothing.

Legend: b sequences, s tokens of a sequence, h hidden, d elements of a head. Sources: FLOPs as in arXiv 2104.04473,
appendix; arXiv 2205.14135 (bytes of attention, FlashAttention 1); arXiv 2307.08691, figures 4 to 7: the rate of
attention rises with s and d as above, and FlashAttention 2 is 1.7 to 3 times as fast as 1. That of Triton, which GPT is
taken to have, reaches 0.64 of its rate forward and 0.46 backward: chosen on the H100 rows of llm-foundry, with and
without recomputation. Bytes a token were counted kernel by kernel.
"""

from collections.abc import Iterable, Iterator, Mapping

from shardlab.forecast.job import Job
from shardlab.planner.gpu import SUSTAINED, Gpu

FP8_FRACTION = 0.88  # best products on H100: 1402.6 of 1979, and 794.5 of 989 in 16 bits (stas00/ml-engineering)
CAST_BYTES, OP_BY_OP_BYTES = 3, 32
TILE = 128 * 256
SPLIT_INNER = 4096
# Rates against FlashAttention 2, forward and backward; stored scores are products and memory-bound work.
FLASH_RATES = {"flash-1": (0.64, 0.46), "flash-2": (1.0, 1.0)}
PRODUCTS, ATTENTION, MEMORY = "matrix products", "attention", "memory-bound work"
Size = tuple[float, float, float]
KERNELS = {"gpt": 14, "llama": 40, "compiled": 14}  # of a layer in forward; backward has twice as many


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


def layer_products(job: Job) -> Iterator[Size]:
    """Rows, inner and columns of a layer's matrix products on a tensor rank."""
    h, ffn, heads, part = job.hidden, job.ffn, job.heads_width, 1 / job.tensor
    yield job.tokens, h, heads * (1 + 2 * job.kv_share) * part
    yield job.tokens, heads * part, h
    yield job.tokens, h, ffn * part * (2 if job.is_gated else 1)
    yield job.tokens, ffn * part, h


def token_bytes(job: Job) -> float:
    """Bytes a token that the memory-bound work of a layer moves in forward, on a tensor rank."""
    h, ffn, heads = job.hidden / job.residual_ranks, job.ffn / job.tensor, job.heads_width / job.tensor
    heads *= 1 + job.kv_share
    if not job.is_gated:
        return 20 * h + 4 * ffn
    return 20 * h + 4 * heads + 6 * ffn if job.compiled else 80 * h + 24 * heads + 10 * ffn


def with_tail(rows: float, inner: float, columns: float, multiprocessors: float) -> float:
    """By how much a product takes longer since half a wave of its tiles stays empty."""
    return 1 + multiprocessors / 2 / (max(1.0, rows * columns / TILE) * max(1.0, inner / SPLIT_INNER))


def attention_share(dim: float, span: float) -> float:
    """What attention in one kernel reaches with heads of so many elements and so long rows, of its best."""
    return dim / (dim + 16) * span / (span + 600)


class Costs:
    """Seconds of a job's layers on a GPU, which may be faster than its preset, forward or backward."""

    def __init__(self, job: Job, gpu: Gpu) -> None:
        self.job, self.gpu, self.itemsize = job, gpu, job.itemsize
        self.peak = gpu.peaks["bf16" if job.precision == "fp8" else job.precision]
        fraction = gpu.product_fractions.get("bf16" if job.precision == "fp8" else job.precision, gpu.product_fraction)
        self.product_rate = self.peak * fraction * SUSTAINED
        self.bandwidth = gpu.memory_bandwidth * gpu.memory_fraction

    def layer(self, *, backward: bool = False) -> Parts:
        """Of one layer."""
        job = self.job
        moved = job.tokens * token_bytes(job) * self.itemsize / 2 * (2 if backward else 1)
        found = Parts({PRODUCTS: self.products(layer_products(job), backward), MEMORY: moved / self.bandwidth})
        return found.add(self.attention(backward))

    def head(self, *, backward: bool = False) -> Parts:
        """Of the product with the vocabulary and of the loss."""
        job, part = self.job, self.job.vocab / self.job.tensor
        a_logit = (36 if job.written == "llama" else 12) / 3 * (2 if backward else 1)
        return Parts({
            PRODUCTS: self.products([(job.tokens, job.hidden, part)], backward, of_layer=False),
            MEMORY: job.tokens * part * a_logit / self.bandwidth,
        })  # fmt: skip

    def recomputed(self) -> float:
        """Of a layer that runs forward again in backward: nothing needs the result of its last product."""
        *_, last = layer_products(self.job)
        return self.layer().total() - self.product(*last)

    def attention(self, backward: bool) -> Parts:
        """Of the scores, on a tensor rank; causal where one kernel makes them."""
        job = self.job
        flops = 4 * job.tokens * job.heads_width / job.tensor  # a token that is attended to
        if job.kernel in FLASH_RATES:
            rate = FLASH_RATES[job.kernel][backward] * self.peak * self.gpu.attention_fraction
            rate *= attention_share(job.heads_width / job.heads, job.span)
            return Parts({ATTENTION: flops * job.span / 2 * (2.5 if backward else 1) / rate})
        times = 2 if backward else 1
        scores = job.tokens * job.seq_len * job.heads / job.tensor
        score_bytes = 6 * self.itemsize if job.kernel == "unfused" else OP_BY_OP_BYTES
        seconds = flops * job.seq_len / self.product_rate + score_bytes * scores / self.bandwidth
        return Parts({ATTENTION: times * seconds})

    def products(self, sizes: Iterable[Size], backward: bool, *, of_layer: bool = True) -> float:
        """Of matrix products, or of those for the gradients of their inputs and of their weights."""
        if backward:
            sizes = [size for m, k, n in sizes for size in ((m, n, k), (k, m, n))]
        return sum(self.product(*size, of_layer=of_layer) for size in sizes)

    def product(self, rows: float, inner: float, columns: float, *, of_layer: bool = True) -> float:
        """Of one matrix product."""
        card, result, in_fp8 = self.gpu, rows * columns, of_layer and self.job.precision == "fp8"
        rate = self.product_rate * (FP8_FRACTION * card.peaks["fp8"] / self.peak if in_fp8 else 1.0)
        seconds = 2 * result * inner / rate * with_tail(rows, inner, columns, card.multiprocessors)
        cast = CAST_BYTES * inner * (rows + columns) if in_fp8 else 0.0
        seconds += (result * self.itemsize + cast) / self.bandwidth
        read = (rows * inner + inner * columns + result) * self.itemsize / self.bandwidth
        return max(seconds, read, card.launch_seconds)
