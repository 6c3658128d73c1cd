"""What is kept between steps and runs where a rank's piece is small, a container holds tensors, or ranks differ."""

import pickle
from collections import deque

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import GradScaler, build_engine
from shardlab.engines.checkpoint.shards import is_counter
from shardlab.engines.sharded_optimizer import ShardedOptimizer
from tests.dist import cases
from tests.dist.every_engine import ENGINES, engine_of
from tests.dist.test_engines import adamw


class Kept(torch.optim.Optimizer):
    """SGD with momentum, which keeps something else than torch's optimizers do."""

    shardlab_looks_at = "element"

    def __init__(self, params, kept):
        super().__init__(params, {"lr": 0.1})
        self.kept = kept

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
            if self.kept == "counter":
                state.setdefault("updates", torch.zeros(1)).add_(1)
            elif self.kept == "tensors":
                state.setdefault("by_beta", {0.9: torch.zeros_like(param)})[0.9].add_(param.grad)
            elif self.kept == "stacked":
                state.setdefault("moments", torch.zeros(2, *param.shape, dtype=param.dtype)).add_(param.grad)
            elif self.kept == "signed step":
                state.setdefault("step", torch.zeros_like(param)).sub_(0.03 * param.grad)
            elif self.kept == "queue":
                state.setdefault("queue", deque([1]))
            param.sub_(state["momentum"], alpha=0.1)


def stepped(engine, rank, steps=2):
    for step in range(steps):
        x = torch.full((2, 3), 1.0 + rank + step, dtype=torch.float64)
        engine.backward(engine(x).square().sum())
        engine.step()
        engine.zero_grad()


def cut_in_the_weight():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()  # with the bias first, rank 0 of two has one element of the weight


def saved(rank, strategy, kept, directory):
    def optimizer(tensors):
        return Kept(tensors, kept)

    with Mesh({"data": 2}) as mesh, build_engine(strategy, cut_in_the_weight(), optimizer, mesh) as engine:
        stepped(engine, rank)
        state = engine.full_optimizer_state_dict()
        engine.save(directory)
        stepped(engine, rank, 1)
        expected = engine.full_state_dict()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, cut_in_the_weight(), optimizer, mesh) as again:
        again.load(directory)
        stepped(again, rank, 1)
        return state, expected, again.full_state_dict()


@pytest.mark.parametrize("kept", ["counter", "signed step"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp"])
def test_small_state_comes_back(pools, tmp_path, strategy, kept):
    for state, expected, again in pools(2).run(saved, strategy, kept, tmp_path / "saved"):
        if kept == "counter":
            assert [state["state"][number]["updates"].tolist() for number in (0, 1)] == [[2.0], [2.0]]
        for name, value in expected.items():
            torch.testing.assert_close(again[name], value, atol=1e-10, rtol=0)


def test_what_is_a_counter():
    assert is_counter([((1, 3), 0, 1)])  # on one rank with one element; the others have said nothing
    assert is_counter([((1,), 0, 1), ((1, 3), 2, 3)])
    assert not is_counter([((1, 3), 0, 1), ((1, 3), 1, 3)])
    assert not is_counter([((), 0, 1)])


def refused(rank, strategy, kept, how, directory, options):
    def optimizer(tensors):
        return Kept(tensors, kept)

    model = nn.Linear(3, 2, bias=False).double()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, optimizer, mesh, **options) as engine:
        stepped(engine, rank, 1)
        try:
            engine.save(directory) if how == "save" else engine.full_optimizer_state_dict()
        except ValueError as error:
            return str(error)
        return None


@pytest.mark.parametrize("how", ["save", "full state"])
@pytest.mark.parametrize("kept", ["tensors", "stacked"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp"])
def test_state_that_cannot_be_put_together_is_refused(pools, tmp_path, strategy, kept, how):
    """Before, the first rank's part was taken for the whole."""
    for message in pools(2).run(refused, strategy, kept, how, tmp_path / "saved", {}):
        assert "cannot be made from it; use an optimizer whose state has the shape" in message
    whole = {"wrap": "root"} if strategy == "fsdp" else {}
    assert pools(2).run(refused, strategy, kept, how, tmp_path / "whole", {"partition": "balanced", **whole}) == [None] * 2


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_state_that_one_rank_cannot_write_is_refused_by_all(pools, tmp_path, strategy):
    first, second = pools(2).run(refused, strategy, "queue", "full state", tmp_path, {})
    assert first == second
    assert "deque" in first


def loaded_with_a_container(rank, strategy):
    model = nn.Linear(3, 2, bias=False).double()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, adamw, mesh) as engine:
        state = engine.full_optimizer_state_dict()
        state["state"] = {0: {"by_beta": {0.9: torch.zeros(2, 3)}}}
        with pytest.raises(ValueError, match="'by_beta' of parameter 'weight' is a dict of tensors"):
            engine.load_full_optimizer_state_dict(state)


def test_whole_tensors_in_a_container_are_not_given_to_pieces(pools):
    pools(2).run(loaded_with_a_container, "zero1")


class SharedMask(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", mask)
        self.register_buffer("part", mask[:2])

    def forward(self, x):
        return self.linear(x) * self.mask.sum()


def with_shared_buffers(rank, directory):
    mask = torch.ones(3, 3)
    with Mesh({"data": 2}) as mesh:
        model = nn.Sequential(SharedMask(mask), SharedMask(mask))
        with build_engine("fsdp", model, adamw, mesh) as engine:
            engine.save(directory)
            engine.load(directory)
            return engine.module[1].mask.tolist()


def test_buffers_that_share_memory_are_saved(pools, tmp_path):
    assert pools(2).run(with_shared_buffers, tmp_path / "saved") == [torch.ones(3, 3).tolist()] * 2


def sharded_optimizer(rank, directory):
    def made(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm=mesh.data, lr=0.1)

    def train(model, optimizer, steps):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(steps):
            model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    with Mesh({"data": 2}) as mesh:
        model, optimizer = made(mesh)
        train(model, optimizer, 2)
        written = pickle.dumps((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 2)
        other, again = made(mesh)
        weights, state = pickle.loads(written)
        other.load_state_dict(weights)
        again.load_state_dict(state)
        train(other, again, 2)
        with pytest.raises(ValueError, match="the state is not of these pieces"):
            again.load_state_dict({**state, "shardlab_pieces": {}})
        same = all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
        return same, optimizer.param_groups[0]["lr"] == again.inner.param_groups[0]["lr"]


def test_a_sharded_optimizer_goes_on_with_the_state_it_loads(pools, tmp_path):
    assert pools(2).run(sharded_optimizer, tmp_path) == [(True, True)] * 2


def names_that_repeat(rank):
    with Mesh({"data": 2}) as mesh:
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        groups = [{"params": one.named_parameters()}, {"params": two.named_parameters(), "lr": 0.5}]
        optimizer = ShardedOptimizer(groups, torch.optim.SGD, comm=mesh.data, lr=0.1)
        before = [param.detach().clone() for param in (one.weight, two.weight)]
        (one(torch.ones(3)).sum() + two(torch.ones(3)).sum()).backward()
        optimizer.step()
        moved = [old - param.detach() for old, param in zip(before, (one.weight, two.weight), strict=True)]
        return [round(float(each.mean()), 6) for each in moved]


def test_groups_may_name_their_parameters_alike(pools):
    assert pools(2).run(names_that_repeat) == [[0.1, 0.5]] * 2


def scaled(rank):
    with Mesh({"data": 2}) as mesh:
        one, two = (build_engine("zero1", cases.build("MLP"), adamw, mesh) for _ in range(2))
        scaler, x = GradScaler(init_scale=4.0), cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)
        one.backward(scaler.scale(one(x).sum()))
        assert scaler.unscale_(one)
        with pytest.raises(RuntimeError, match="call it once a step"):
            scaler.unscale_(one)
        with pytest.raises(ValueError, match="make a GradScaler for each engine"):
            scaler.unscale_(two)
        with pytest.raises(ValueError, match="make a GradScaler for each engine"):
            scaler.step(two)
        assert scaler.step(one)
        one.zero_grad()
        # A loop that looks itself and goes on: the next step is unscaled anew.
        one.backward(scaler.scale(one(x).sum()) * torch.inf)
        assert not scaler.unscale_(one)
        one.zero_grad()
        one.backward(scaler.scale(one(x).sum()))
        return scaler.step(one)


def test_a_scaler_belongs_to_one_engine_and_unscales_once(pools):
    assert pools(2).run(scaled) == [True, True]


def frozen_apart(rank, strategy):
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    model[1 + rank].requires_grad_(False)
    with Mesh({"data": 2}) as mesh, pytest.raises(ValueError, match=r"1.weight \[3, 3\] float32 frozen, rank 1 has 1.w"):
        build_engine(strategy, model, adamw, mesh)


@pytest.mark.parametrize("strategy", ["ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp"])
def test_ranks_that_freeze_other_parameters_are_refused(pools, strategy):
    pools(2).run(frozen_apart, strategy)


def norm_with_a_nan(rank, transport):
    with Mesh({"data": 2}, transport=transport) as mesh, build_engine("zero1", cases.build("MLP"), adamw, mesh) as engine:
        engine.backward(engine(cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)).sum())
        if rank == 1:
            next(tensor for tensor in engine.step_tensors() if tensor.grad is not None).grad.view(-1)[0] = torch.nan
        return float(engine.clip_grad_norm_(1.0, torch.inf))


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_the_largest_element_of_a_gradient_with_nan_is_nan(pools, transport):
    assert all(norm != norm for norm in pools(2).run(norm_with_a_nan, transport))


def fused_and_transposed(rank, directory):
    """As an optimizer keeps its state in its parameter's strides, so must what is loaded."""

    def optimizer(tensors):
        return torch.optim.AdamW(tensors, lr=0.1, fused=True)

    def model():
        torch.manual_seed(0)
        made = nn.Linear(3, 4).double()
        made.weight = nn.Parameter(made.weight.detach().T.contiguous().T)
        return made

    found = []
    for strategy in ("zero1", "ddp", "single"):
        with Mesh({"data": 1}, ranks=[rank]) as mesh, build_engine(strategy, model(), optimizer, mesh) as engine:
            if strategy == "zero1":
                stepped(engine, 0)
                engine.save(directory / str(rank))
                state = engine.full_optimizer_state_dict()
                weights = engine.full_state_dict()
            elif strategy == "ddp":
                engine.load(directory / str(rank))
            else:
                engine.load_full_state_dict(weights)
                engine.load_full_optimizer_state_dict(state)
            stepped(engine, 0, 2)
            found.append(engine.full_state_dict()["weight"])
    return [float((found[0] - other).abs().max()) for other in found[1:]]


def test_loaded_state_has_the_strides_of_its_parameter(pools, tmp_path):
    for differences in pools(2).run(fused_and_transposed, tmp_path):
        assert max(differences) < 1e-10


class CountsForAll(torch.optim.SGD):
    """Keeps its steps under a key that is no parameter."""

    def step(self, closure=None):
        super().step()
        self.state["all"]["step"] = self.state["all"].get("step", 0) + 1


class CountsBeside(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "count": 1}


def beside_the_parameters(rank, key, kind, directory):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=lambda tensors: kind(tensors, lr=0.1)) as engine:
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        engine.backward(cases.loss_of(engine(x), y))
        engine.step()
        for save in (lambda: engine.save(directory), engine.full_optimizer_state_dict):
            with pytest.raises(ValueError, match=r"optimizer: Counts.* keeps '\w+' beside the state of its parameters"):
                save()


@pytest.mark.parametrize("kind", [CountsForAll, CountsBeside])
@pytest.mark.parametrize("key", ["ddp", "zero2", "zero3", "fsdp"])
def test_state_that_belongs_to_no_parameter_is_not_lost_unseen(pools, tmp_path, key, kind):
    pools(2).run(beside_the_parameters, key, kind, tmp_path / "saved")


def closed(rank, key):
    with engine_of(key, 2, cases.build("MLP"), "sgd") as engine:
        pass
    x = cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)
    for use in (lambda: engine(x), lambda: engine.backward(engine.module(x).sum()), engine.step,
                lambda: engine.clip_grad_norm_(1.0)):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"engine: {engine.name} was closed"):
            use()
    engine.module(x).sum().backward()
    torch.optim.SGD(engine.module.parameters(), lr=0.1).step()


@pytest.mark.parametrize("key", ENGINES)
def test_a_closed_engine_is_not_used(pools, key):
    pools(4 if "hybrid" in key else 2).run(closed, key)
