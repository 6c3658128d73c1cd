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


def memory_runs_out(rank, key):
    """full_params() whose second allocation fails on all ranks; then they train on. The losses."""
    options = {"precision": "bf16", "bucket_bytes": 100}
    with engine_of(key, 2, cases.build("MLP").float(), "sgd", **options) as engine, pytest.MonkeyPatch.context() as patch:
        empty, made = torch.empty, []

        def fails_once(*args, **kwargs):
            made.append(args)
            if len(made) == 2:
                raise torch.OutOfMemoryError("no memory")
            return empty(*args, **kwargs)

        patch.setattr(torch, "empty", fails_once)
        with pytest.raises(torch.OutOfMemoryError), engine.full_params():
            pass
        patch.undo()
        x, y = (cases.own_rows(part.float(), rank) for part in cases.rows("MLP", 0, 0, 2))
        losses = []
        for _ in range(2):
            losses.append(float(loss := cases.loss_of(engine(x).float(), y)))
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
        return losses


@pytest.mark.parametrize("key", ["zero1", "zero2", "zero3"])
def test_training_goes_on_where_memory_ran_out_in_full_params(pools, key):
    for first, second in pools(2).run(memory_runs_out, key):
        assert second < first


class Renamed(torch.nn.Module):
    """Takes states with an old name, and states of its first version, whose weight was the other way round."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight, self.norm = torch.nn.Parameter(torch.randn(6, 6)), torch.nn.BatchNorm1d(6)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def old_states(rank, key, states):
    """What is there after each state is loaded."""
    found = []
    with engine_of(key, 2, Renamed().double(), "sgd") as engine:
        for state in states:
            engine.load_full_state_dict(state)
            found.append(engine.full_state_dict())
    return found


@pytest.mark.parametrize("key", ["ddp", "zero1", "zero3", "fsdp"])
def test_what_plain_torch_loads_of_an_older_module_is_loaded(pools, key):
    model, states, expected = Renamed().double(), [], []
    for change in ("none", "renamed", "version 1"):
        state = Renamed().double().state_dict()
        if change == "renamed":
            state["old"] = state.pop("weight")
        if change == "version 1":
            del state["norm.num_batches_tracked"]  # which BatchNorm's first version had not
        states.append(dict(state) if change == "version 1" else state)
        model.load_state_dict(states[-1])
        expected.append({name: value.clone() for name, value in model.state_dict().items()})
    for found in pools(2).run(old_states, key, states):
        for own, wanted in zip(found, expected, strict=True):
            assert_states([own], wanted)
            assert own._metadata[""] == {"version": 2}


def refused_and_put_back(rank, options):
    """An attribute is replaced, before full_params() and inside it, and put back; what is held."""
    model = cases.build("MLP")
    with engine_of("fsdp", 2, model, "sgd", **options) as engine:
        owner, name = next((owner, name) for owner in model.modules() for name in owner._parameters)
        own, other = owner._parameters[name], torch.nn.Parameter(torch.zeros(owner._parameters[name].shape).double())
        owner._parameters[name] = other
        with pytest.raises(RuntimeError, match="was replaced"), engine.full_params():
            pass
        owner._parameters[name] = own
        engine.unshard("0")
        with pytest.raises(RuntimeError, match="was replaced"), engine.full_params():
            own, owner._parameters[name] = owner._parameters[name], other
        owner._parameters[name] = own
        engine.reshard("0")
        return [(bucket.num_holders, bucket._shows_copy, bucket.state.name) for bucket in engine.buckets]


@pytest.mark.parametrize("options", [{}, {"sharding": "no_shard"}, {"replicate_below": 10**6}])
def test_a_refusal_of_full_params_leaves_nothing_held(pools, options):
    for held in pools(2).run(refused_and_put_back, options):
        assert set(held) == {(0, False, "SHARDED")}


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
