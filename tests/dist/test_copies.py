"""Copies of a wrapped module: plain modules of equal values that train alone, or a refusal that names full_params()."""

import copy
import contextlib
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.test_engines import adamw, one_step
from tests.dist.test_fsdp import assert_states, build
from tests.dist.test_in_flight import SETUPS

WHOLE = ("ddp", "bucketed", "zero1", "zero2")
SHARDED = tuple(setup for setup in SETUPS if setup not in WHOLE)


def sequential():
    """With a buffer and a tied weight, and of classes that a pickle can name."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5)]
    layers[4].weight = layers[2].weight
    layers[0].register_buffer("shift", torch.arange(5.0))
    return nn.Sequential(*layers).double()


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "torch.save": saved_and_loaded}


def with_full_params(engine, setup):
    return engine.full_params() if setup in SHARDED else contextlib.nullcontext()


def copied(rank, setup, num_ranks, way):
    strategy, options = SETUPS[setup]
    log = Log()
    with Mesh({"data": num_ranks}) as mesh, build_engine(strategy, sequential(), adamw, mesh, **options) as engine:
        one_step(engine, rank)
        with with_full_params(engine, setup):
            made = WAYS[way](engine.module)
        engine.zero_grad()
        state = engine.full_state_dict()
        sizes = [param.untyped_storage().nbytes() - param.nbytes for param in made.parameters()]
        equal = all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
        with mesh.observed_by(log):
            optimizer = adamw(list(made.parameters()))
            x, y = cases.rows("MLP", 1, 0, num_ranks)
            cases.loss_of(made(x), y).backward()
            optimizer.step()
        untouched = all(torch.equal(value, state[name]) for name, value in engine.full_state_dict().items())
        one_step(engine, rank, step=1)
        shares = made[2].weight is made[4].weight
        with build_engine("single", made, adamw):  # it takes an engine of its own
            pass
        return equal, untouched, shares, len(log.events), sizes, made.state_dict(), engine.full_state_dict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_copy_is_a_plain_module_of_its_own(pools, setup, way):
    model = sequential()
    optimizer = adamw(list(model.parameters()))
    for step in (0, 1):
        x, y = cases.rows("MLP", step, 0, 2)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            ours = copy.deepcopy(model)
    fresh = adamw(list(ours.parameters()))
    cases.loss_of(ours(x), y).backward()
    fresh.step()
    for equal, untouched, shares, sent, spare_bytes, state, of_engine in pools(2).run(copied, setup, 2, way):
        assert (equal, untouched, shares, sent) == (True, True, True, 0)
        if way == "deepcopy":
            assert not any(spare_bytes), "a parameter of the copy holds more than itself"
        assert_states([state], ours.state_dict())
        assert_states([of_engine], model.state_dict())


def refused(rank, setup):
    strategy, options = SETUPS[setup]
    with Mesh({"data": 2}) as mesh, build_engine(strategy, sequential(), adamw, mesh, **options) as engine:
        for way in WAYS.values():
            with pytest.raises(RuntimeError, match=r"is sharded.*full_params\(\)"):
                way(engine.module)
        with pytest.raises(RuntimeError, match=r"is sharded.*full_params\(\)"):
            engine.module[0].weight.data.clamp_(-1, 1)
        one_step(engine, rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", SHARDED)
def test_what_is_released_is_not_copied(pools, setup):
    """Nor written: ``.data`` of a stand-in would take the values and lose them."""
    states = pools(2).run(refused, setup)
    model = sequential()
    optimizer = adamw(list(model.parameters()))
    x, y = cases.rows("MLP", 0, 0, 2)
    cases.loss_of(model(x), y).backward()
    optimizer.step()
    assert_states(states, model.state_dict())


def part_copied(rank):
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", build(), adamw, mesh) as engine:
        with engine.full_params():
            block = copy.deepcopy(engine.module.blocks[1])
            around = copy.deepcopy(nn.Sequential(engine.module))
        x = torch.ones(2, 8).double()
        block(x).sum().backward()
        around(torch.ones(2, 7).double()).sum().backward()
        return block.inner.weight.grad is not None, [param.grad is None for param in engine.params.values()]


def test_a_copy_of_a_part_or_of_what_is_around_is_plain_too(pools):
    for has_gradient, engine_has_none in pools(2).run(part_copied):
        assert has_gradient
        assert all(engine_has_none)


def averaged(rank, setup, num_ranks):
    strategy, options = SETUPS[setup]
    with Mesh({"data": num_ranks}) as mesh, build_engine(strategy, build(), adamw, mesh, **options) as engine:
        with with_full_params(engine, setup):
            average = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            one_step(engine, rank, step=step)
            engine.zero_grad()
            with with_full_params(engine, setup):
                average.update_parameters(engine.module)
        return average.module.state_dict(), engine.full_state_dict()


@pytest.mark.parametrize("setup", SETUPS)
def test_an_averaged_model_is_that_of_one_process(pools, setup):
    model = build()
    optimizer = adamw(list(model.parameters()))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        x, y = cases.rows("MLP", step, 0, 3)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    for of_average, of_engine in pools(3).run(averaged, setup, 3):
        assert_states([of_average], average.module.state_dict())
        assert_states([of_engine], model.state_dict())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda engine: torch.save(engine, io.BytesIO())])
def test_an_engine_itself_is_not_copied(copied):
    with (
        build_engine("zero1", build(), adamw) as engine,
        pytest.raises(TypeError, match=r"engine\.full_state_dict\(\)"),
    ):
        copied(engine)
