"""What columns share is never that of an earlier step, also where a static buffer is refilled in place."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.comm.slices import merge
from shardlab.partition.slices import slices_of
from shardlab.tensor_parallel import Column, Row, parallelize_module
from tests.comm.test_communicator import Log
from tests.tensor_parallel.test_layers import close, random


class Gated(nn.Module):
    """Two columns of one input, in a container, whose forward torch never calls."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.into = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
            self.out = nn.Linear(16, 8)

    def forward(self, x):
        return self.out(torch.tanh(self.into[0](x)) * self.into[1](x))


def parallel(model, comm, *, regather):
    plan = {"into.*": Column(sequence_dim=1, regather=regather), "out": Row(sequence_dim=1)}
    return parallelize_module(model, plan, comm)


def gradient_of_weights(model, x, way):
    loss, weights = model(x).square().sum(), [layer.weight for layer in (*model.into, model.out)]
    if way == "autograd.grad":
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
    else:
        loss.backward(inputs=weights if way == "inputs" else None)
    return loss.detach()


def refilled(rank, regather, way, through_data):
    """Two steps from one buffer: the loss, the gradients of the weights, and what was sent for the input."""
    with Mesh({"tensor": 2}) as mesh:
        comm = mesh["tensor"]
        model, log, steps = parallel(Gated().double(), comm, regather=regather), Log(), []
        buffer = torch.zeros(2, 2, 8, dtype=torch.float64, requires_grad=True)
        for seed in (1, 2):
            part = random(2, 4, 8, seed=seed).chunk(2, 1)[rank]
            with torch.no_grad():
                (buffer.data if through_data else buffer).copy_(part)
            with comm.observed_by(log):
                loss = gradient_of_weights(model, buffer, way)
            comm.all_reduce(loss).wait()
            slices = slices_of(model)
            weights = {name: param for name, param in model.named_parameters() if "weight" in name}
            steps.append((loss, {name: merge(weight.grad, slices[name], comm) for name, weight in weights.items()}))
            model.zero_grad()
        seen = weakref.ref(buffer)
        del buffer, loss
        gc.collect()
        num_sent = sum("gather" in event.op and "input" in event.tag for event in log.events)
        return steps, num_sent, seen() is not None


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize(("regather", "way"), [(False, "backward"), (True, "inputs"), (True, "autograd.grad")])
def test_a_buffer_refilled_in_place_is_a_new_input(pools, through_data, regather, way):
    results = pools(2).run(refilled, regather, way, through_data)
    for step, seed in enumerate((1, 2)):
        plain = Gated().double()
        loss = gradient_of_weights(plain, random(2, 4, 8, seed=seed), way)
        for steps, num_sent, is_kept in results:
            assert not is_kept
            close(steps[step][0], loss)
            for name, gradient in steps[step][1].items():
                close(gradient, plain.get_parameter(name).grad)
            assert num_sent == (4 if regather else 2)  # once a step for both columns, and once again in backward


def under_autocast(rank, regather):
    with Mesh({"tensor": 2}) as mesh:
        model = parallel(Gated(), mesh["tensor"], regather=regather)
        x = random(2, 4, 8, seed=1).float().chunk(2, 1)[rank].clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return y.detach(), {"x": x.grad} | {name: param.grad for name, param in model.named_parameters()}


def test_gathering_again_under_autocast_changes_nothing(pools):
    once, again = (pools(2).run(under_autocast, regather) for regather in (False, True))
    for (y, gradients), (found_y, found) in zip(once, again, strict=True):
        torch.testing.assert_close(found_y, y, atol=0, rtol=0)
        torch.testing.assert_close(found, gradients, atol=1e-2, rtol=1e-2)


class ByMethod(Gated):
    """Its columns are called by a method that no hook of a module surrounds."""

    def encode(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.encode(x)


def in_turns(rank):
    """Two steps from one array that numpy refills, each of one column: the outputs, and whether an input is kept."""
    with Mesh({"tensor": 2}) as mesh:
        model = parallel(ByMethod().double(), mesh["tensor"], regather=False)
        array = np.zeros((2, 2, 8))
        x, found = torch.from_numpy(array), []
        seen = weakref.ref(x)
        for seed, column in enumerate(model.into):
            array[:] = random(2, 4, 8, seed=seed).chunk(2, 1)[rank].numpy()
            with torch.no_grad():
                found.append(model.out(column(x)))
        del x
        gc.collect()
        return found, seen() is not None


def test_a_column_never_gets_the_input_that_another_had_earlier(pools):
    plain = ByMethod().double()
    results = pools(2).run(in_turns)
    for seed, column in enumerate(plain.into):
        expected = plain.out(column(random(2, 4, 8, seed=seed))).detach()
        close(torch.cat([found[seed] for found, _ in results], 1), expected)
    assert not any(is_kept for _, is_kept in results)
