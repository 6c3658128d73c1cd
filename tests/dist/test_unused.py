"""A gradient that is tiny and negative is a gradient: only a parameter nobody used is skipped by the optimizer."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from shardlab.vocabulary import HostTransport
from tests.dist.every_engine import ALL, KINDS, step_on

KEYS = ("ddp", *KINDS, "zero1-balanced", "fsdp-no_shard")
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


def trained(rank, key, dtype, slopes, precision=None, transport=None):
    """The parameters after two steps."""
    strategy, options = ALL[key]
    options = options if precision is None else {**options, "precision": precision}
    with (
        Mesh({"data": len(slopes)}, transport=transport) as mesh,
        build_engine(strategy, Sometimes(dtype), decayed, mesh, **options) as engine,
    ):
        for _ in range(2):
            step_on(engine, engine(slopes[rank]))
        return engine.full_state_dict()


def check(states):
    for state in states:
        assert torch.equal(state["never"], torch.ones_like(state["never"]))
        torch.testing.assert_close(state["tiny"], torch.full_like(state["tiny"], 0.25), atol=1e-3, rtol=0)


def on_first(slope, num_ranks):
    return (slope, *[None] * (num_ranks - 1))


@pytest.mark.parametrize("key", ["fsdp", "fsdp-no_shard"])
def test_what_becomes_zero_in_the_dtype_of_the_reduction_is_still_a_gradient(pools, key):
    for precision, slope in (
        (Precision(reduce=torch.float16), -1e-9),
        (Precision(reduce=torch.bfloat16), -1e-42),
        (Precision(compute=torch.bfloat16, reduce=torch.float16), -1e-9),
    ):
        for transport in HostTransport:
            check(pools(3).run(trained, key, torch.float32, on_first(slope, 3), precision, str(transport)))


@pytest.mark.parametrize("key", KEYS)
def test_the_smallest_negative_number(pools, key):
    """Where 1/N is multiplied in before the reduction, it becomes -0."""
    for dtype, smallest in SMALLEST.items():
        for transport in HostTransport:
            check(pools(3).run(trained, key, dtype, on_first(-smallest, 3), None, str(transport)))


@pytest.mark.parametrize("key", KEYS)
def test_gradients_that_cancel(pools, key):
    for dtype in SMALLEST:
        check(pools(3).run(trained, key, dtype, (-1e-3, 1e-3, None)))
