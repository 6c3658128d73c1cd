"""Parameters that code reaches other than by their attribute: each is trained as in plain torch, or refused by name."""

import functools
import pickle
import re
import types
import warnings

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of

linear = nn.functional.linear
PLACES = [(key, size) for key in ENGINES for size in ((4,) if "hybrid" in key else (2, 3))]
USED = r"(?s)parameter '(first|middle|head)\.\w+' is sharded.*wrap='root'.*full_params\(\)"


def scripted(layer):
    """Computes in C++, where nothing of Python is asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = torch.jit.script(layer)
    return lambda x: compiled(x)


# Makes, from a layer, what computes as the layer does, without a look at its attributes.
KEPT = {
    "list": lambda layer: functools.partial(lambda kept, x: linear(x, *kept), list(layer.parameters())),
    "tuple": lambda layer: functools.partial(
        lambda kept, x: linear(x, kept[0][0], kept[1]), ((layer.weight,), layer.bias)
    ),
    "dict": lambda layer: functools.partial(lambda kept, x: linear(x, **kept), dict(layer.named_parameters())),
    "partial": lambda layer: functools.partial(linear, weight=layer.weight, bias=layer.bias),
    "closure": lambda layer, w=None: (lambda weight, bias: lambda x: x @ weight.T + bias)(layer.weight, layer.bias),
    "object": lambda layer: functools.partial(
        lambda kept, x: torch.addmm(kept.bias, x, kept.weight.t()),
        types.SimpleNamespace(**dict(layer.named_parameters())),
    ),
    "script": scripted,
}


class Net(nn.Module):
    """Three layers, each a unit of FSDP, of which one is computed with, but never called."""

    def __init__(self, kind, place):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)
        self.double()
        self.place, self.kept = place, KEPT[kind](getattr(self, place))

    def forward(self, x):
        for name in ("first", "middle", "head"):
            x = torch.tanh(self.kept(x) if name == self.place else getattr(self, name)(x))
        return x


def build(kind, place, frozen=False):
    torch.manual_seed(0)
    model = Net(kind, place)
    getattr(model, place).requires_grad_(not frozen)
    return model


def trained(rank, key, num_ranks, stories, wrap=nn.Linear):
    return [trained_one(rank, key, num_ranks, story, wrap) for story in stories]


def trained_one(rank, key, num_ranks, story, wrap):
    """The state after two steps, or what the first of them was refused with, after which nothing has changed."""
    with engine_of(key, num_ranks, build(*story), "sgd", **{"wrap": wrap} if key.startswith("fsdp") else {}) as engine:
        before = engine.full_state_dict()
        for step in range(2):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", step, 0, num_ranks))
            try:
                engine.backward(cases.loss_of(engine(x), y))
            except RuntimeError as error:
                engine.zero_grad()
                assert_states([engine.full_state_dict()], before)
                return str(error)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@functools.cache
def plain(num_ranks, story):
    model = build(*story)
    optimizer = cases.OPTIMIZERS["sgd"]([param for param in model.parameters() if param.requires_grad])
    for step in range(2):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_right_or_refused(results, expected):
    """All ranks alike."""
    if any(isinstance(result, str) for result in results):
        assert all(isinstance(result, str) and re.search(USED, result) for result in results), results
    else:
        assert_states(results, expected)


# What is kept, in which layer, and whether that is frozen.
STORIES = [
    *(("list", place, frozen) for place, frozen in (("first", False), ("first", True), ("middle", True))),
    *((kind, "head", False) for kind in KEPT if kind != "script"),
    *(("script", place, frozen) for place, frozen in (("first", False), ("middle", True), ("head", False))),
]


@pytest.mark.parametrize(("key", "num_ranks"), [place for place in PLACES if "-" not in place[0] or "fsdp" in place[0]])
def test_a_parameter_that_a_module_keeps_elsewhere_is_trained_or_refused_by_name(pools, key, num_ranks):
    for story, *results in zip(STORIES, *pools(num_ranks).run(trained, key, num_ranks, STORIES), strict=True):
        assert_right_or_refused(results, plain(num_ranks, story))


@pytest.mark.parametrize("key", [key for key in ENGINES if key.startswith("fsdp") and "hybrid" not in key])
def test_with_what_the_refusal_says_to_write_it_trains(pools, key):
    for story, *results in zip(STORIES, *pools(2).run(trained, key, 2, STORIES, "root"), strict=True):
        assert_states(results, plain(2, story))


def penalty(module):
    """Of all kinds that save the parameter for backward; that of the absolute value is 0 for a NaN."""
    return 0.01 * sum((param.square() + param.abs() + param.exp()).sum() for param in module.parameters())


def penalised(rank, key, num_ranks, is_after):
    with engine_of(key, num_ranks, cases.build("MLP"), "sgd") as engine:
        for step in range(2):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", step, 0, num_ranks))
            loss = cases.loss_of(engine(x), y) if is_after else 0
            with engine.full_params() as module:
                loss = loss + penalty(module)
            engine.backward(loss if is_after else loss + cases.loss_of(engine(x), y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_a_penalty_on_weights_is_computed_inside_full_params(pools, key, num_ranks):
    model = cases.build("MLP")
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(2):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        (cases.loss_of(model(x), y) + penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for is_after in (True, False):
        assert_states(pools(num_ranks).run(penalised, key, num_ranks, is_after), model.state_dict())


def held_by_hand(rank, key, num_ranks):
    """What is computed with a unit that was gathered by hand is refused once that is resharded, and nothing else."""
    with engine_of(key, num_ranks, cases.build("MLP"), "sgd", wrap=nn.Linear) as engine:
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, num_ranks))
        for is_penalised in (True, False):
            loss = cases.loss_of(engine(x), y)
            engine.unshard("0")
            size = engine.module[0].weight.abs().sum()
            engine.reshard("0")
            if is_penalised:
                with pytest.raises(RuntimeError, match=r"modified by an inplace operation|'0.weight'"):
                    engine.backward(loss + size)
                engine.zero_grad()
            else:
                engine.backward(loss)
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("key", [key for key in ENGINES if key.startswith("fsdp") and "hybrid" not in key])
def test_a_graph_of_a_unit_gathered_by_hand_ends_with_that(pools, key):
    for num_ranks in (2, 3):
        expected = cases.reference("MLP", "sgd", num_ranks, steps=1).state
        assert_states(pools(num_ranks).run(held_by_hand, key, num_ranks), expected)


def kept_outside(rank, key, num_ranks):
    """Uses of a parameter that was kept from before the engine: all would give NaN, or be lost."""
    model = cases.build("MLP")
    kept = list(model.parameters())
    told = {}
    with engine_of(key, num_ranks, model, "sgd") as engine:
        loss = cases.loss_of(engine(torch.ones(2, 7).double()), torch.zeros(2, 5).double())
        before = engine.full_state_dict()
        for name, use in {
            "computed with": lambda: loss + sum(param.abs().sum() for param in kept),
            "read": lambda: kept[0].detach().clone(),
            "its data": lambda: kept[0].data.mean(),
            "pickled": lambda: pickle.dumps(kept),
            "written": lambda: torch.no_grad()(lambda: kept[0].mul_(2))(),
            "replaced": lambda: setattr(kept[0], "data", torch.ones(16, 7).double()),
        }.items():
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' is sharded.*full_params\(") as caught:
                use()
            told[name] = str(caught.value)
        engine.backward(loss)
        engine.zero_grad()
        assert_states([engine.full_state_dict()], before)
        with engine.full_params(keep_changes=True):
            kept[0].data.mul_(2)  # the same object
        assert torch.equal(engine.full_state_dict()["0.weight"], 2 * before["0.weight"])
        engine.close()
        assert type(kept[0]) is nn.Parameter
        assert kept[0] is model[0].weight
        assert torch.equal(kept[0], 2 * before["0.weight"])
    return told


@pytest.mark.parametrize(
    ("key", "num_ranks"), [(key, size) for key, size in PLACES if key.startswith(("zero3", "fsdp"))]
)
def test_a_parameter_kept_from_before_the_engine_is_used_where_it_is_gathered(pools, key, num_ranks):
    for told in pools(num_ranks).run(kept_outside, key, num_ranks):
        assert "keep_changes=True" in told["written"]
        assert "keep_changes=True" in told["replaced"]
        assert "full_state_dict" in told["read"]
