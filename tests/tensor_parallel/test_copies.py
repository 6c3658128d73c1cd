"""Copies of a tensor-parallel module are refused: a copy would lack the hooks on parameters that are whole."""

import copy
import pickle

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.tensor_parallel.test_engines import OPTIMIZERS, PLANS, batch, build, loss_of, parallel


def copied(rank, plan):
    with Mesh({"data": 1, "tensor": 2}) as mesh:
        model, average = parallel(rank, mesh, PLANS[plan]), build()
        with build_engine("ddp", model, OPTIMIZERS["sgd"], mesh) as engine:
            for part in (model, engine.module):
                for way in (copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=r"axis 'tensor'.*before parallelize_module"):
                        way(part)
            x, y = batch(0, 0)
            engine.backward(loss_of(engine, x, y, mesh["tensor"]))
            engine.step()
            average.load_state_dict(engine.full_state_dict())  # what the refusal says to do
            return average(x)


@pytest.mark.parametrize("plan", PLANS)
def test_a_copy_is_refused_and_the_whole_model_is_to_be_had(pools, plan):
    model, (x, y) = build(), batch(0, 0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loss_of(model, x, y, None).backward()
    optimizer.step()
    for output in pools(2).run(copied, plan):
        torch.testing.assert_close(output, model(x), atol=1e-10, rtol=0)


def copied_in_a_group_of_one(rank):
    with Mesh({"data": 2, "tensor": 1}) as mesh:
        model, (x, _) = parallel(0, mesh, PLANS["whole"]), batch(0, 0)
        return bool((copy.deepcopy(model)(x) == model(x)).all())


def test_a_model_on_one_tensor_rank_is_copied(pools):
    assert all(pools(2).run(copied_in_a_group_of_one))
