"""Whose module it is: one engine's at a time, a copy's own, and plain torch's again when the engine is closed."""

import contextlib
import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.every_engine import KINDS, PIECES, SHARDED, adamw, assert_states, engine_of, one_step, sgd
from tests.dist.nasty import Deep
from tests.dist.telling import Stories

STORIES = Stories()
story = STORIES.story
ON = (*KINDS, "ddp", "fsdp-no_shard")


# One engine's at a time.


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = cases.build("MLP")
        self.head = nn.Linear(5, 5).double()

    def forward(self, x):
        return self.head(self.body(x))


def shares_a_parameter(model):
    other = nn.Linear(7, 16).double()
    other.weight = model.body[0].weight
    return other


def wrapped_round_about(rank, key):
    said = []
    torch.manual_seed(0)  # engines make parameters equal to those of rank 0, which no rank must see as a change
    outer = Outer()
    sharing = shares_a_parameter(outer)
    before = {name: value.clone() for name, value in sharing.state_dict().items()}
    for first, second, other in (
        (outer, outer, "zero1"),
        (outer, outer.body, "fsdp"),
        (outer.body, outer, "zero1"),
        (outer, outer.body[2], "fsdp"),
        (outer, sharing, "zero1"),
    ):
        with engine_of(key, 2, first, optimizer_fn=sgd) as engine:
            kinds = [type(param) for param in second.parameters()]
            with pytest.raises(ValueError, match=r"^model: .*close\(\) that engine first") as caught:
                build_engine(other, second, sgd, engine.mesh)
            assert [type(param) for param in second.parameters()] == kinds
            said.append(str(caught.value))
            x = torch.ones(2, 7, dtype=torch.float64) * (rank + 1)
            engine.backward(engine(x).square().sum())
            engine.zero_grad()
        with engine_of(key, 2, second, optimizer_fn=sgd):  # free again
            pass
    assert all(torch.equal(value, before[name]) for name, value in sharing.state_dict().items())
    return said


@pytest.mark.parametrize("key", ["bucketed", "fsdp"])
def test_a_module_belongs_to_one_engine(pools, key):
    first, second = pools(2).run(wrapped_round_about, key)
    assert first == second
    twice, inside, round_about, deep, sharing = first
    assert "model: it is wrapped by an engine" in twice
    assert "it is in a module of an engine" in inside
    assert "its module 'body' is wrapped by an engine" in round_about
    assert "it is in a module of an engine" in deep
    assert "its parameter 'weight' is in a module of an engine" in sharing


def left_open(rank, key):
    mesh, model = Mesh({"data": 2}), cases.build("MLP")
    engine = build_engine(key, model, adamw, mesh)
    one_step(engine)
    gone = [weakref.ref(it) for it in (engine, model, mesh)]
    del engine
    gc.collect()
    kept = gone[0]() is not None  # by the module, which would train without it
    del mesh, model
    gc.collect()
    return kept, [reference() is None for reference in gone]


@pytest.mark.parametrize("key", [*KINDS, "ddp"])
def test_what_is_dropped_goes(pools, key):
    """An engine that was never closed, with its module."""
    assert pools(2).run(left_open, key) == [(True, [True, True, True])] * 2


# Copies.


def sequential():
    """With a buffer and a tied weight, and of classes that a pickle can name."""
    layers = [nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5)]
    layers[4].weight = layers[2].weight
    layers[0].register_buffer("shift", torch.arange(5.0))
    return nn.Sequential(*layers)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def held_if_sharded(user):
    """Where parameters are whole, nobody needs to ask for them."""
    return user.full_params() if user.rank is not None and user.name in SHARDED else contextlib.nullcontext()


@story(model=sequential, optimizer=adamw, on=(*KINDS, "fsdp-dim0", "fsdp-no_shard"))
def a_copy_is_a_plain_module_of_its_own(user):
    user.train(0)
    found = {}
    for way in (copy.deepcopy, saved_and_loaded):
        with user.full_params() if user.rank is not None and user.name == "fsdp" else held_if_sharded(user):
            made = way(user.module)
        if way is copy.deepcopy:
            assert not any(param.untyped_storage().nbytes() - param.nbytes for param in made.parameters())
        assert made[2].weight is made[4].weight
        before, log = user.full_state_dict(), Log()
        x, y = cases.rows("MLP", 1, 0, user.num_ranks)
        with contextlib.nullcontext() if user.rank is None else user.mesh.observed_by(log):
            optimizer = adamw(list(made.parameters()))
            cases.loss_of(made(x), y).backward()
            optimizer.step()
        assert not log.events
        assert_states([user.full_state_dict()], before)
        with build_engine("single", made, adamw):  # it takes an engine of its own
            pass
        found |= {f"{way.__name__}.{name}": value.clone() for name, value in made.state_dict().items()}
    user.train(1)
    return found


@story(model=Deep, optimizer=adamw)
def a_model_is_averaged(user):
    with held_if_sharded(user):
        average = AveragedModel(user.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        user.train(step)
        with held_if_sharded(user):
            average.update_parameters(user.module)
    return {name: value.clone() for name, value in average.module.state_dict().items()}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda engine: torch.save(engine, io.BytesIO())])
def test_an_engine_itself_is_not_copied(copied):
    engine = build_engine("zero1", cases.build("MLP"), adamw)
    with engine, pytest.raises(TypeError, match=r"engine\.full_state_dict\(\)"):
        copied(engine)


# Plain torch's again.


def hooks_of(model, params):
    """Every hook on a module, and on a parameter or what stands in its place."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    tensors = {*params, *model.parameters()}
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return on_modules + sum(len(getattr(tensor, kind) or ()) for tensor in tensors for kind in kinds)


def alone_after_close(user):
    user.train(0)
    model, optimizer = user.module, user.optimizer
    user.close()
    assert user.rank is None or hooks_of(model, ()) == 0
    assert "zero_grad" not in vars(model) | vars(optimizer)
    log = Log()
    with contextlib.nullcontext() if user.rank is None else user.mesh.observed_by(log):
        optimizer = adamw(list(model.parameters()))
        for step in (1, 2):
            x, y = cases.rows("MLP", step, 0, user.num_ranks)
            cases.loss_of(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model.zero_grad()
            assert all(param.grad is None for param in model.parameters())
    assert not log.events


story(model=Deep, on=(*ON, "torch_ddp"))(alone_after_close)


@story(on=ON, refused=r"engine: \w+ was closed", instead=lambda user: None)
def a_closed_engine_is_used(user):
    x = user.rows(0)[0]
    user.close()
    user.close()
    for use in (
        lambda: user(x),
        lambda: user.backward(user.module(x).sum()),
        user.step,
        lambda: user.clip_grad_norm_(1.0),
        user.zero_grad,
    ):
        with user.refused():
            use()
    user.module.zero_grad()


@story(on=(*KINDS, "fsdp-no_shard", "fsdp-offload"))
def closed_after_full_params(user):
    with user.full_params(keep_changes=True) as model, torch.no_grad():
        model[0].weight.mul_(2)
    user.close()
    model(torch.ones(2, 7).double()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    return {name: param.detach().clone() for name, param in model.named_parameters()}


story(name="the_same_in_16_bits", on=PIECES, options={"precision": Precision(torch.bfloat16)})(closed_after_full_params)


@story(on=("zero3", "fsdp", "fsdp-no_shard"), model="Tied")
def a_released_parameter_has_its_metadata(user):
    plain = cases.build("Tied")
    for (name, param), (known, wanted) in zip(user.module.named_parameters(), plain.named_parameters(), strict=True):
        assert (name, param.shape, param.dtype, param.requires_grad) == (known, wanted.shape, wanted.dtype, True)
        assert (param.device.type, param.is_cpu, param.is_cuda, param.is_meta) == ("cpu", True, False, False)
    with user.full_params() as module:
        assert module.encoder.weight is module.decoder.weight
    user.train(0)
    user.close()


test_stories = STORIES.told()
