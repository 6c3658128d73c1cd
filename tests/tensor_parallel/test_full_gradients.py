"""Gradients and optimizer state of a tensor-parallel model, put together under every engine and every plan."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.models import next_token_loss
from tests.tensor_parallel.test_engines import (
    ENGINES,
    OPTIMIZERS,
    PLANS,
    batch,
    build,
    loss_of,
    num_ranks_of,
    parallel,
)


def gathered(rank, key, plan):
    strategy, options, axes = ENGINES[key]
    with Mesh(axes) as mesh:
        model = parallel(rank, mesh, PLANS[plan])
        with build_engine(strategy, model, OPTIMIZERS["adamw"], mesh, **options) as engine:
            found = []
            for step in range(2):
                x, y = batch(step, 0, engine.data_rank, engine.num_data_ranks)
                engine.backward(loss_of(engine, x, y, mesh["tensor"]))
                found.append(engine.full_gradients())
                engine.step()
                engine.zero_grad(set_to_none=False)
            state = engine.named_optimizer_state()
            engine.load_named_optimizer_state(state)
            return found, state, engine.named_optimizer_state()


@pytest.mark.parametrize("key", ENGINES)
def test_they_are_those_of_the_whole_model(pools, key):
    model = build()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    expected = []
    for step in range(2):
        x, y = batch(step, 0)
        next_token_loss(model(x), y).backward()
        expected.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    for plan in PLANS:
        for found, state, again in pools(num_ranks_of(key)).run(gathered, key, plan):
            for own, plain in zip(found, expected, strict=True):
                assert list(own) == list(plain)
                for name, gradient in plain.items():
                    torch.testing.assert_close(own[name], gradient, atol=1e-10, rtol=0)
            for name, param in model.named_parameters():
                for entry, value in optimizer.state[param].items():
                    torch.testing.assert_close(state[name][entry], value, atol=1e-10, rtol=0)
                    assert torch.equal(again[name][entry], state[name][entry])
