"""``full_params()`` of every engine: the whole parameters inside, and what becomes of what is written into them."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import PLACES, assert_states, engine_of, kinds_of, options_of


def step(engine, rank, kind, number, num_ranks):
    x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, number, 0, num_ranks))
    engine.backward(cases.loss_of(engine(x), y))
    engine.step()
    engine.zero_grad()


def read_and_written(rank, key, kind, num_ranks):
    """Read before and after a step; scaled, and a step on what has been written."""
    found = []
    with engine_of(key, num_ranks, cases.build(kind, seed=rank), "sgd", **options_of(key, kind)) as engine:
        for number in range(2):
            with engine.full_params() as module:
                assert module is engine.module
                found.append({name: param.detach().clone() for name, param in module.named_parameters()})
            step(engine, rank, kind, number, num_ranks)
        if key == "torch_fsdp2":
            with (
                pytest.raises(ValueError, match="keep_changes: .* load_full_state_dict"),
                engine.full_params(keep_changes=True),
            ):
                pass
            return found, None
        with engine.full_params(keep_changes=True) as module, torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)
        step(engine, rank, kind, 2, num_ranks)
        return found, engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_they_are_those_of_one_process(pools, key, num_ranks):
    for kind in kinds_of(key, num_ranks):
        model = cases.build(kind)
        optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
        expected = []
        for number in range(3):
            if number < 2:
                expected.append({name: param.detach().clone() for name, param in model.named_parameters()})
            else:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5)
            x, y = cases.rows(kind, number, 0, num_ranks)
            cases.loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results = pools(num_ranks).run(read_and_written, key, kind, num_ranks)
        for place, state in enumerate(expected):
            assert_states([found[place] for found, _ in results], state)
        if key != "torch_fsdp2":
            assert_states([after for _, after in results], model.state_dict())


def not_kept(rank, key):
    with engine_of(key, 2, cases.build("MLP"), "sgd") as engine:
        before = engine.full_state_dict()
        with engine.full_params() as module, torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)
        after = engine.full_state_dict()
    return {name: bool(torch.equal(value, after[name] * 2)) for name, value in before.items()}


@pytest.mark.parametrize("key", ["bucketed", "zero1", "zero2", "zero3", "fsdp", "fsdp-dim0"])
def test_where_parameters_are_whole_every_change_holds_else_only_what_is_kept(pools, key):
    whole = key in ("bucketed", "zero1", "zero2")
    for holds in pools(2).run(not_kept, key):
        assert set(holds.values()) == {whole}


def torch_tp(rank):
    with (
        Mesh({"data": 1, "tensor": 2}) as mesh,
        build_engine("torch_tp", cases.build("SmallGPT"), cases.OPTIMIZERS["sgd"], mesh) as engine,
        pytest.raises(NotImplementedError, match=r"full_params: .* use full_state_dict\(\)"),
    ):
        engine.full_params()


def test_torch_tp_says_what_to_use(pools):
    pools(2).run(torch_tp)
