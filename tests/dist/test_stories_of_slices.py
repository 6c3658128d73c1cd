"""Gradients of slices under tensor parallelism: a norm of slices is not the model's, so only the engine may clip."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.tensor_parallel import Column, Row, parallelize_module
from tests.dist import cases
from tests.dist.every_engine import KINDS, assert_states

WORDS = r"write engine\.clip_grad_norm_\(max_norm\)"
STRATEGIES = pytest.mark.parametrize("strategy", ["single", *KINDS])


def changes_gradients(tensors):
    return torch.optim.SGD(tensors, lr=0.01, momentum=0.9, nesterov=True, foreach=True)


def sliceable():
    return cases.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))).double()


@contextlib.contextmanager
def slices_trained_by(strategy):
    with Mesh({"data": 1, "tensor": 2}) as mesh:
        model = sliceable()
        parallelize_module(model, {"0": Column(), "2": Row()}, mesh["tensor"])
        with build_engine(strategy, model, changes_gradients, mesh) as engine:
            yield engine


def loss_of_step(model, step):
    return model(torch.full((2, 4), step + 1.0).double()).square().sum()


def plainly():
    model = sliceable()
    loss_of_step(model, 0).backward()
    changes_gradients(model.parameters()).step()
    return model.state_dict()


AFTER_MEANS = (
    lambda engine: engine.step(),
    lambda engine: engine.backward(loss_of_step(engine, 1)),
    lambda engine: loss_of_step(engine, 1).backward(),
    lambda engine: GradScaler(init_scale=1.0).step(engine),
    lambda engine: engine.clip_grad_norm_(1.0),
)
CLIPS = (
    lambda engine: clip_grad_norm_(engine.module.parameters(), 1e-3),
    lambda engine: clip_grad_norm_(engine.step_tensors().where(lambda name: "weight" in name), 1e-3),
)


def clipped_too_early(rank, strategy):
    with slices_trained_by(strategy) as engine:
        if strategy != "single":
            with engine.no_sync():
                engine.backward(loss_of_step(engine, 0))
            with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_"):
                clip_grad_norm_(engine.module.parameters(), 1e-3)
                engine.step()
            engine.zero_grad()
        for then in AFTER_MEANS:
            for clip in CLIPS:
                engine.backward(loss_of_step(engine, 0))
                with pytest.raises(RuntimeError, match=WORDS):
                    clip(engine)
                    then(engine)
                engine.zero_grad()
        engine.backward(loss_of_step(engine, 0))
        engine.step()
        return engine.full_state_dict()


@STRATEGIES
def test_torch_s_clipping_of_slices_is_refused(pools, strategy):
    assert_states(pools(2).run(clipped_too_early, strategy), plainly())


def halved(engine):
    for tensor in engine.step_tensors():
        tensor.grad = tensor.grad * 0.5


def zeroed_first(engine):
    engine.zero_grad(set_to_none=False)
    engine.backward(loss_of_step(engine, 1))


def stepped_first(engine):
    engine.step()
    engine.backward(loss_of_step(engine, 1))


def stepped_first_alone(model, optimizer):
    optimizer.step()
    loss_of_step(model, 1).backward()


# What each does to slices, and what it does to the model's gradients in one process.
ALLOWED = {
    "the engine's clipping": (
        lambda engine: engine.clip_grad_norm_(1e-3),
        lambda model, _: clip_grad_norm_(model.parameters(), 1e-3),
    ),
    "out of place": (halved, lambda model, _: [p.grad.mul_(0.5) for p in model.parameters()]),
    "zeros": (zeroed_first, lambda model, _: (model.zero_grad(), loss_of_step(model, 1).backward())),
    "a step that changes them": (stepped_first, stepped_first_alone),
    "unscaled": (
        lambda engine: GradScaler(init_scale=2.0).unscale_(engine),
        lambda model, _: [p.grad.div_(2) for p in model.parameters()],
    ),
}


def changed(rank, strategy):
    states = {}
    for way, (change, _) in ALLOWED.items():
        with slices_trained_by(strategy) as engine:
            for _ in range(2):
                engine.backward(loss_of_step(engine, 0))
                change(engine)
                engine.step()
                engine.zero_grad()
            states[way] = engine.full_state_dict()
    return states


@STRATEGIES
def test_what_may_be_done_to_gradients_of_slices(pools, strategy):
    results = pools(2).run(changed, strategy)
    for way, (_, change) in ALLOWED.items():
        model = sliceable()
        optimizer = changes_gradients(model.parameters())
        for _ in range(2):
            loss_of_step(model, 0).backward()
            change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert_states([states[way] for states in results], model.state_dict())
