"""Torch's own engines, behind our interface, equal one process in float64 to 1e-10, at 3 ranks."""

import gc
import weakref

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import axes_of, engine_of, sgd
from tests.dist.test_parity import Loop, assert_equal, train_all

KINDS = {
    "torch_ddp": ("Uneven", "Frozen", "NonContiguous"),
    "torch_zero1": ("Uneven", "Tied"),
    "torch_fsdp2": ("MLP", "Frozen"),
    "torch_tp": ("WideGPT",),
}
OPTIONS = {
    "torch_ddp": [("Unused", {"find_unused_parameters": True}), ("SmallGPT", {"bucket_bytes": 512})],
    "torch_zero1": [("MLP", {"parameters_as_bucket_view": True})],
    "torch_fsdp2": [("Tied", {"wrap": "root"}), ("SmallGPT", {"reshard_after_forward": False})],
    "torch_tp": [("WideGPT", {"plan": {"blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row"}})],
}
LOOPS = (Loop("adamw", 3, 0.05), Loop("sgd", plain=True))


@pytest.mark.parametrize("strategy", KINDS)
def test_equals_one_process(pools, strategy):
    todo = [(kind, Loop("sgd"), {}) for kind in KINDS[strategy]]
    todo += [("WideGPT" if strategy == "torch_tp" else "SmallGPT", loop, {}) for loop in LOOPS]
    todo += [(kind, Loop("sgd"), options) for kind, options in OPTIONS[strategy]]
    assert_equal(pools(3).run(train_all, strategy, todo), todo, 1 if strategy == "torch_tp" else 3)


def load_and_read(rank, strategy):
    """A state loaded is the state read, and the plain module takes it."""
    saved = cases.build("WideGPT", seed=7).state_dict()
    with engine_of(strategy, 2, cases.build("WideGPT", seed=rank), optimizer_fn=sgd) as engine:
        engine.load_full_state_dict(saved)
        state = engine.full_state_dict()
        with pytest.raises(RuntimeError, match="nonsense"):
            engine.load_full_state_dict({**saved, "nonsense": torch.zeros(1)})
    cases.build("WideGPT").load_state_dict(state)
    return all(torch.equal(state[name], value) for name, value in saved.items())


@pytest.mark.parametrize("strategy", KINDS)
def test_a_loaded_state_is_read_back(pools, strategy):
    assert pools(2).run(load_and_read, strategy) == [True, True]


def left_open(rank, strategy):
    """Whether engine and communicator are gone when nobody knows engine, module and closed mesh any more."""
    mesh = Mesh(axes_of(strategy, 2))
    engine = build_engine(strategy, cases.build("WideGPT"), sgd, mesh)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    engine.backward(engine(tokens).sum())
    gone = [weakref.ref(engine), weakref.ref(mesh.communicators[-1])]
    mesh.close()
    del engine, mesh
    gc.collect()
    return [reference() is None for reference in gone]


@pytest.mark.parametrize("strategy", KINDS)
def test_a_peer_that_is_never_closed_goes_with_its_module(pools, strategy):
    assert pools(2).run(left_open, strategy) == [[True, True]] * 2
