"""Torch's own engines, behind our interface, equal one process in float64 to 1e-10, at 2 and 3 ranks."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.peers.training import Setting, build, reference, train

KINDS = {
    "torch_ddp": ("MLP", "SmallGPT", "Uneven", "Tied", "Frozen", "NonContiguous"),
    "torch_zero1": ("MLP", "SmallGPT", "Uneven", "Tied"),
    "torch_fsdp2": ("MLP", "SmallGPT", "Frozen"),
    "torch_tp": ("WideGPT",),
}
WORLD_SIZES = (2, 3)


def check(pools, setting, num_ranks, **tolerance):
    expected = reference(setting, num_ranks)
    for rank, (result, _) in enumerate(pools(num_ranks).run(train, setting)):
        where = f"{setting} on rank {rank} of {num_ranks}"
        assert result.losses == pytest.approx(expected.losses, abs=1e-10), where
        assert result.norms == pytest.approx(expected.norms, abs=1e-10), where
        assert result.state.keys() == expected.state.keys(), where
        for name, value in expected.state.items():
            assert (result.state[name] - value).abs().max() < 1e-10, f"{name}: {where}"
    return expected


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("strategy", KINDS)
def test_equals_one_process(pools, strategy, num_ranks):
    for kind in KINDS[strategy]:
        check(pools, Setting(strategy, kind), num_ranks)


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("strategy", KINDS)
def test_accumulation_clipping_and_adamw_equal_one_process(pools, strategy, num_ranks):
    kind = "WideGPT" if strategy == "torch_tp" else "SmallGPT"
    setting = Setting(strategy, kind, optimizer="adamw", steps=3, micro_batches=3, clip=0.05)
    assert max(check(pools, setting, num_ranks).norms) > 0.05, "the clip must bite, or the test shows nothing"


@pytest.mark.parametrize(
    ("strategy", "kind", "options"),
    [
        ("torch_ddp", "Unused", {"find_unused_parameters": True}),
        ("torch_ddp", "SmallGPT", {"bucket_bytes": 512}),
        ("torch_fsdp2", "Tied", {"wrap": "root"}),
        ("torch_fsdp2", "SmallGPT", {"reshard_after_forward": False}),
        ("torch_tp", "WideGPT", {"plan": {"blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row"}}),
    ],
)
def test_options_equal_one_process(pools, strategy, kind, options):
    check(pools, Setting(strategy, kind, options), 3)


@pytest.mark.parametrize("strategy", KINDS)
def test_plain_backward_equals_one_process(pools, strategy):
    kind = "WideGPT" if strategy == "torch_tp" else "SmallGPT"
    check(pools, Setting(strategy, kind, plain_backward=True), 2)


def load_and_read(rank, strategy):
    """A state loaded is the state read, and the plain module takes it."""
    axes = {"data": 1, "tensor": 2} if strategy == "torch_tp" else {"data": 2}
    saved = build("WideGPT", seed=7).state_dict()
    with Mesh(axes) as mesh, build_engine(strategy, build("WideGPT", seed=rank), sgd, mesh) as engine:
        engine.load_full_state_dict(saved)
        state = engine.full_state_dict()
        with pytest.raises(RuntimeError, match="nonsense"):
            engine.load_full_state_dict({**saved, "nonsense": torch.zeros(1)})
    build("WideGPT", seed=0).load_state_dict(state)
    return all(torch.equal(state[name], value) for name, value in saved.items())


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=1e-2)


@pytest.mark.parametrize("strategy", KINDS)
def test_a_loaded_state_is_read_back(pools, strategy):
    assert pools(2).run(load_and_read, strategy) == [True, True]


def clip_without_gradients(rank, strategy):
    axes = {"data": 1, "tensor": 2} if strategy == "torch_tp" else {"data": 2}
    with Mesh(axes) as mesh, build_engine(strategy, build("WideGPT", seed=rank), sgd, mesh) as engine:
        return float(engine.clip_grad_norm_(1.0))


@pytest.mark.parametrize("strategy", KINDS)
def test_without_gradients_their_norm_is_zero(pools, strategy):
    assert pools(2).run(clip_without_gradients, strategy) == [0.0, 0.0]


def train_alone_afterwards(rank):
    """After ``close`` each rank's module has the gradients of its own rows."""
    model = cases.build("MLP")
    with Mesh({"data": 2}) as mesh:
        build_engine("torch_ddp", model, sgd, mesh).close()
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        cases.loss_of(model(x), y).backward()
    return model[0].weight.grad


def test_after_close_a_module_trains_alone(pools):
    ours, others = pools(2).run(train_alone_afterwards)
    x, y = (cases.own_rows(part, 0) for part in cases.rows("MLP", 0, 0, 2))
    model = cases.build("MLP")
    cases.loss_of(model(x), y).backward()
    assert torch.equal(ours, model[0].weight.grad)
    assert not torch.equal(ours, others)


def left_open(rank, strategy):
    """Whether engine and communicator are gone when nobody knows engine, module and closed mesh any more."""
    mesh = Mesh({"data": 1, "tensor": 2} if strategy == "torch_tp" else {"data": 2})
    engine = build_engine(strategy, build("WideGPT", seed=0), sgd, mesh)
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


def used_after_the_mesh(rank):
    mesh = Mesh({"data": 2})
    with build_engine("torch_ddp", build("WideGPT", seed=0), sgd, mesh) as engine:
        mesh.close()
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="mesh: it is closed, so all_reduce cannot be sent"):
            engine.backward(engine(tokens).sum())


def test_a_closed_mesh_is_an_error(pools):
    pools(2).run(used_after_the_mesh)


def test_the_reference_is_that_of_the_other_engines():
    """The harness here and that of tests/dist describe the same training."""
    setting = Setting("torch_ddp", "MLP", steps=3)
    ours, theirs = reference(setting, 2), cases.reference("MLP", "sgd", 2, steps=3)
    assert ours.losses == theirs.losses
    assert reference(replace(setting, steps=2), 2).losses == theirs.losses[:2]
