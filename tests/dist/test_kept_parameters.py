"""Parameters that code reaches other than by their attribute: each is trained as in plain torch, or refused by name."""

import functools
import re
import types
import warnings

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import KINDS, OUR_PLACES, assert_states, engine_of

linear = nn.functional.linear
UNITS = ("fsdp", "fsdp-shard_grad_op", "fsdp-no_shard")
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


@pytest.mark.parametrize("key", [*KINDS, *UNITS[1:]])
def test_a_parameter_that_a_module_keeps_elsewhere_is_trained_or_refused_by_name(pools, key):
    num_ranks = 2
    for story, *results in zip(STORIES, *pools(num_ranks).run(trained, key, num_ranks, STORIES), strict=True):
        assert_right_or_refused(results, plain(num_ranks, story))


@pytest.mark.parametrize("key", UNITS)
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


@pytest.mark.parametrize(("key", "num_ranks"), OUR_PLACES[1:])
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
