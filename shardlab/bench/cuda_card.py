"""The card of this machine: a ``Device`` whose seconds are those of CUDA."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

WARM_S, READ_S = 0.2, 0.2  # for how long something is run before it is read, and while
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
DEPTH, WIDTH = 24, 64  # of the layers whose kernels have next to nothing to do


class CudaCard:
    """The first card that torch sees.

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
        """See ``Device``."""
        left, right = (
            torch.randn(*shape, device="cuda", dtype=DTYPES[precision]) for shape in ((rows, inner), (inner, columns))
        )
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            return _seconds(lambda: left @ right)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def attention(self, precision: str, sequences: int, heads: int, tokens: int, dim: int) -> float:
        """See ``Device``."""
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
        """See ``Device``."""
        source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return _seconds(lambda: target.copy_(source))

    def host_copy(self, num_bytes: int) -> float:
        """See ``Device``."""
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(here, device="cuda")
        return max(_seconds(lambda: there.copy_(here, non_blocking=True)), _seconds(lambda: here.copy_(there)))

    def launches(self, kind: str) -> tuple[float, int]:
        """See ``Device``."""
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
    """How many kernels a call launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    return max(1, len(on_device))


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
