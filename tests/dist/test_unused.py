"""A gradient that is tiny and negative is a gradient: only a parameter nobody used is skipped by the optimizer."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from shardlab.engines.unused_params import mark_all_used, nobody_used, write_unused
from shardlab.vocabulary import HostTransport

ENGINES = {
    "ddp": ("ddp", {}),
    "bucketed": ("bucketed", {}),
    "zero1": ("zero1", {}),
    "zero1-whole": ("zero1", {"partition": "balanced"}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0"}),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}),
}
# Half of the smallest number of each dtype rounds to zero, with its sign.
SMALLEST = {torch.float32: 1.4e-45, torch.float64: 5e-324}


class Sometimes(nn.Module):
    """``tiny`` is used by some ranks only; every element of its gradient is ``slope``."""

    def __init__(self, dtype):
        super().__init__()
        self.always = nn.Parameter(torch.ones(3, dtype=dtype))
        self.tiny = nn.Parameter(torch.ones(6, 2, dtype=dtype))
        self.never = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, slope):
        out = self.always.sum()
        return out if slope is None else out + Times.apply(self.tiny, slope)


class Times(torch.autograd.Function):
    """slope x sum(tensor), whose gradient is exactly ``slope``: a product with a subnormal loss would round."""

    @staticmethod
    def forward(ctx, tensor, slope):
        ctx.slope, ctx.like = slope, tensor.detach()
        return tensor.sum() * 0.0

    @staticmethod
    def backward(ctx, _):
        return torch.full_like(ctx.like, ctx.slope), None


def decayed(tensors):
    """Weight decay shows whether a parameter was skipped."""
    return torch.optim.SGD(tensors, lr=1.0, weight_decay=0.5)


def trained(rank, key, dtype, slopes, precision=None, transport=None, flush=False):
    """The parameters after two steps."""
    strategy, options = ENGINES[key]
    options = options if precision is None else {**options, "precision": precision}
    if flush:
        assert torch.set_flush_denormal(True)
    try:
        with (
            Mesh({"data": len(slopes)}, transport=transport) as mesh,
            build_engine(strategy, Sometimes(dtype), decayed, mesh, **options) as engine,
        ):
            for _ in range(2):
                engine.backward(engine(slopes[rank]))
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict()
    finally:
        torch.set_flush_denormal(False)


def check(states):
    for state in states:
        assert torch.equal(state["never"], torch.ones_like(state["never"]))
        torch.testing.assert_close(state["tiny"], torch.full_like(state["tiny"], 0.25), atol=1e-3, rtol=0)


def on_first(slope, num_ranks):
    return (slope, *[None] * (num_ranks - 1))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("reduce", "slope"), [(torch.float16, -1e-9), (torch.bfloat16, -1e-42)])
@pytest.mark.parametrize("key", ["fsdp", "fsdp-dim0", "fsdp-no_shard"])
def test_what_becomes_zero_in_the_dtype_of_the_reduction_is_still_a_gradient(pools, key, reduce, slope, num_ranks):
    for transport in HostTransport:
        precision = Precision(reduce=reduce)
        slopes = on_first(slope, num_ranks)
        check(pools(num_ranks).run(trained, key, torch.float32, slopes, precision, str(transport)))


@pytest.mark.parametrize("key", ["fsdp", "fsdp-dim0", "fsdp-no_shard"])
def test_between_two_16_bit_dtypes(pools, key):
    precision = Precision(compute=torch.bfloat16, reduce=torch.float16)
    check(pools(2).run(trained, key, torch.float32, on_first(-1e-9, 2), precision))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("key", ENGINES)
def test_the_smallest_negative_number(pools, key, num_ranks):
    """Where 1/N is multiplied in before the reduction, it becomes -0."""
    for dtype, smallest in SMALLEST.items():
        for transport in HostTransport:
            slopes = on_first(-smallest, num_ranks)
            check(pools(num_ranks).run(trained, key, dtype, slopes, None, str(transport)))


@pytest.mark.parametrize("key", ENGINES)
def test_gradients_that_cancel(pools, key):
    for dtype in SMALLEST:
        check(pools(3).run(trained, key, dtype, (-1e-3, 1e-3, None)))


@pytest.mark.parametrize("key", ENGINES)
def test_sums_whose_tiny_results_are_flushed_to_zero(pools, key):
    """``torch.set_flush_denormal(True)``: a difference of normal numbers becomes -0."""
    for dtype in SMALLEST:
        tiny = torch.finfo(dtype).tiny * 8
        check(pools(3).run(trained, key, dtype, (-1.5 * tiny, 1.4375 * tiny, None), None, "shared_memory", True))


@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float16])
def test_flushed_in_16_bits(pools, reduce):
    tiny = torch.finfo(reduce).tiny * 8
    slopes = (-1.5 * tiny, 1.4375 * tiny, None)
    check(pools(3).run(trained, "fsdp", torch.float32, slopes, Precision(reduce=reduce), "shared_memory", True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("flush", [False, True])
def test_marking_changes_nothing_but_the_sign_of_zero(dtype, flush):
    smallest = torch.finfo(dtype).smallest_normal
    values = [-0.0, 0.0, -1.0, 3.0, float("inf"), float("nan"), -smallest]
    buffer = torch.tensor(values, dtype=dtype)
    expected = buffer.clone()
    expected[0] = 0.0
    torch.set_flush_denormal(flush)
    try:
        mark_all_used([buffer[place : place + 1] for place in range(len(values))])
    finally:
        torch.set_flush_denormal(False)
    assert not nobody_used({0: buffer, 6: buffer[6:]})
    if flush and dtype is not torch.float16:
        expected[6] = 0.0  # a difference of such numbers would be flushed
    torch.testing.assert_close(buffer, expected, atol=0, rtol=0, equal_nan=True)
    write_unused(buffer)
    assert nobody_used({0: buffer}) == {0}
