"""Gradients are divided by N on their way into a bucket: what comes twice, early or too small to divide is still right."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine

SMALLEST = 5e-324  # half of it is 0, and half of its negative -0, which also says "unused"


class Idle(nn.Module):
    """One parameter is never used, so its bucket is complete only when backward has been finished."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def model():
    torch.manual_seed(0)
    return Idle().double()


def rows(rank, number):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + number))


def loss_of(output):
    return output.square().mean()


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.5)


def two_backwards(rank, strategy, num_ranks, later):
    """Two plain ``loss.backward()`` after two forwards; ``later``: the second only accumulates, a third sends."""
    with Mesh({"data": num_ranks}) as mesh, build_engine(strategy, model(), sgd, mesh) as engine:
        losses = [loss_of(engine(rows(rank, number))) for number in range(3)]
        losses[0].backward()
        if later:
            with engine.no_sync():
                losses[1].backward()
        else:
            losses[1].backward()
        losses[2].backward()
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "zero2"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_plain_backwards_add_up_until_the_bucket_is_sent(pools, num_ranks, strategy, later):
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for rank in range(num_ranks):
        for number in range(3):
            (loss_of(alone(rows(rank, number))) / num_ranks).backward()
    optimizer.step()
    for state in pools(num_ranks).run(two_backwards, strategy, num_ranks, later):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def too_small_to_divide(rank, strategy):
    """Rank 1 alone uses the parameter, with a gradient that vanishes when it is divided by 2."""
    module = nn.Linear(1, 1, bias=False).double()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, module, sgd, mesh) as engine:
        if rank == 1:
            engine.backward((engine(torch.ones(1, 1, dtype=torch.float64)) * -SMALLEST).sum())
        else:
            engine.finish_gradients()
        return [(name, tensor.grad is not None) for name, tensor in engine.step_tensors().items() if tensor.numel()]


@pytest.mark.parametrize("strategy", ["ddp", "bucketed", "zero1", "zero2"])
def test_a_gradient_too_small_to_divide_is_still_a_gradient(pools, strategy):
    seen = [entry for entries in pools(2).run(too_small_to_divide, strategy) for entry in entries]
    assert seen
    assert all(has_gradient for _, has_gradient in seen)
