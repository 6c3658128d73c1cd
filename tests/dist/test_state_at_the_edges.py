"""What is kept between steps and runs where a rank's piece is small, a container holds tensors, or ranks differ."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import PIECES, assert_states, engine_of, one_step, step_on


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
            param.sub_(state["momentum"], alpha=0.1)


def stepped(engine, rank, steps=2):
    for step in range(steps):
        x = torch.full((2, 3), 1.0 + rank + step, dtype=torch.float64)
        step_on(engine, engine(x).square().sum())


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


def test_tensors_in_a_container_are_optimizer_state_too():
    model = nn.Linear(3, 1)
    with build_engine("single", model, lambda tensors: Kept(tensors, "tensors")) as engine:
        step_on(engine, engine(torch.ones(2, 3)).sum())
        held = engine.live_tensors()[Role.OPTIMIZER_STATE]
    assert sum(tensor.nbytes for tensor in held) == 2 * sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("strategy", PIECES)
def test_small_state_comes_back(pools, tmp_path, strategy):
    for kept in ("counter", "signed step"):
        for state, expected, again in pools(2).run(saved, strategy, kept, tmp_path / kept):
            if kept == "counter":
                assert [state["state"][number]["updates"].tolist() for number in (0, 1)] == [[2.0], [2.0]]
            assert_states([again], expected)


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


@pytest.mark.parametrize("strategy", PIECES)
def test_state_that_cannot_be_put_together_is_refused(pools, tmp_path, strategy):
    """Before, the first rank's part was taken for the whole."""
    options = {"partition": "balanced", **({"wrap": "root"} if strategy == "fsdp" else {})}
    for kept, how in (("tensors", "save"), ("stacked", "full state")):
        for message in pools(2).run(refused, strategy, kept, how, tmp_path / "saved", {}):
            assert "cannot be made from it; use an optimizer whose state has the shape" in message
        assert pools(2).run(refused, strategy, kept, how, tmp_path / "whole", options) == [None] * 2


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

    shardlab_looks_at = "element"

    def step(self, closure=None):
        super().step()
        self.state["all"]["step"] = self.state["all"].get("step", 0) + 1


class CountsBeside(torch.optim.SGD):
    shardlab_looks_at = "element"

    def state_dict(self):
        return {**super().state_dict(), "count": 1}


def beside_the_parameters(rank, key, kind, directory):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=lambda tensors: kind(tensors, lr=0.1)) as engine:
        one_step(engine)
        for save in (lambda: engine.save(directory), engine.full_optimizer_state_dict):
            with pytest.raises(ValueError, match=r"optimizer: Counts.* keeps '\w+' beside the state of its parameters"):
                save()


@pytest.mark.parametrize(("key", "kind"), [("bucketed", CountsForAll), ("zero1", CountsBeside), ("fsdp", CountsForAll)])
def test_state_that_belongs_to_no_parameter_is_not_lost_unseen(pools, tmp_path, key, kind):
    pools(2).run(beside_the_parameters, key, kind, tmp_path / "saved")
