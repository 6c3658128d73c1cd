"""Stages of the nasty kinds on two and four ranks, against one process."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.comm.mesh import Mesh
from shardlab.engines import DDP, FSDP, Bucketed, ZeRO1, build_engine
from shardlab.launch import RankError
from shardlab.pipeline import Pipeline
from shardlab.schedules import make_schedule


class Unused(nn.Module):
    """A branch that nobody takes, a 0-d parameter, sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.taken, self.other = nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return torch.tanh(self.taken(x)) * self.scale


def frozen(*places):
    def make():
        layers = [nn.Linear(5, 5), Unused(), nn.Linear(5, 5), nn.Linear(5, 3)]
        for place in places:
            layers[place].requires_grad_(False)
        return nn.Sequential(*layers)

    return make


def with_an_empty_stage():
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def called_twice():
    """One module in two stages, and its weight in a third."""
    shared, third = nn.Linear(5, 5), nn.Linear(5, 5)
    third.weight = shared.weight
    again = nn.Sequential(shared, nn.LayerNorm(5))
    return nn.Sequential(shared, nn.Tanh(), nn.Linear(5, 5), again, third, nn.Linear(5, 3))


def tied_and_unused():
    """Weights of several stages: one that none of them uses, and one that the last of them uses."""
    layers = [Unused(), Unused(), Unused(), nn.Linear(5, 3)]
    layers[1].other.weight = layers[2].other.weight = layers[0].other.weight
    layers[1].other.bias = layers[3].bias
    return nn.Sequential(*layers)


class Recomputed(nn.Module):
    """Half of it runs again in backward, and a layer that is given one row without a batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)), nn.Linear(5, 5)
        self.query = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False) + self.outer(self.query)


def recomputed():
    return nn.Sequential(*(Recomputed() for _ in range(3)), nn.Linear(5, 3))


def norm_in_two_places():
    norm = nn.BatchNorm1d(5)
    return nn.Sequential(nn.Linear(5, 5), norm, nn.Linear(5, 5), norm, nn.Linear(5, 3))


MODELS = {
    "a BatchNorm with two places": (norm_in_two_places, ("1", "2", "4")),
    "an unused branch": (frozen(), ()),
    "the first stage frozen": (frozen(0), ("1", "2", "3")),
    "a stage in the middle frozen": (frozen(2), ("1", "2", "3")),
    "a stage without parameters": (with_an_empty_stage, ("1", "3", "5")),
    "a weight of several stages that nobody uses": (tied_and_unused, ("1", "2", "3")),
    "a module in several stages": (called_twice, ("2", "3", "4")),
    "activations that are computed again": (recomputed, ("1", "2", "3")),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def sgd(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1)


def rows_of(step, num_data_ranks):
    """Of another size in the second step: the last batch of a data set."""
    x = torch.sin(torch.arange(num_data_ranks * (8 - 4 * step) * 5, dtype=torch.float64)).view(num_data_ranks, -1, 5)
    return x, x[..., :3] + 1


def trained(_, name, axes, plan, make):
    options = {"stages_per_rank": 4 // axes["pipe"]} if axes["pipe"] < 4 else {}
    schedule = make_schedule("interleaved" if options else plan, axes["pipe"], 4, **options)
    with Mesh(axes) as mesh:
        pipeline = Pipeline(made(name), schedule, mesh, MODELS[name][1])
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            for step in range(2):
                x, y = (every[mesh["data"].rank] for every in rows_of(step, axes["data"]))
                pipeline.run(engine, nn.functional.mse_loss, x, y)
                engine.clip_grad_norm_(0.5)
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict()


def one_process(name, num_data_ranks):
    model = made(name)
    optimizer = sgd(model.parameters())
    for step in range(2):
        x, y = (every.flatten(0, 1) for every in rows_of(step, num_data_ranks))
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {key: param.detach() for key, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "axes", "plan", "make"),
    [
        ("an unused branch", {"pipe": 2, "data": 2}, "", ZeRO1),
        ("the first stage frozen", {"pipe": 2, "data": 2}, "", Bucketed),
        ("a stage in the middle frozen", {"pipe": 2, "data": 2}, "", FSDP),
        ("a stage without parameters", {"pipe": 2, "data": 1}, "", DDP),
        ("a weight of several stages that nobody uses", {"pipe": 4, "data": 1}, "1f1b", ZeRO1),
        ("a module in several stages", {"pipe": 2, "data": 2}, "", FSDP),
        ("a module in several stages", {"pipe": 4, "data": 1}, "zb-h1", ZeRO1),
        ("activations that are computed again", {"pipe": 4, "data": 1}, "zb-h1", FSDP),
    ],
)
def test_equal_to_one_process(pools, name, axes, plan, make):
    found = {}
    for state in pools(axes["pipe"] * axes["data"]).run(trained, name, axes, plan, make):
        found |= state
    wanted = one_process(name, axes["data"])
    assert set(wanted) <= set(found)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, atol=1e-12, rtol=0, msg=key)


def test_buffers_that_several_stages_would_write_are_refused(pools):
    with pytest.raises(RankError, match=r"forward writes '\d.num_batches_tracked', which several stages use"):
        pools(2).run(trained, "a BatchNorm with two places", {"pipe": 2, "data": 1}, "1f1b", DDP)


def test_a_rank_without_parameters_is_refused_on_all(pools):
    with pytest.raises(RankError, match="those of rank 1 have no parameters; name others in 'begins'"):
        pools(4).run(trained, "a stage without parameters", {"pipe": 4, "data": 1}, "1f1b", DDP)
