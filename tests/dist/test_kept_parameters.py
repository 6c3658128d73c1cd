"""Parameters that code reaches other than by their attribute: each is trained as in plain torch, or refused by name."""

import functools
import re
import types
import warnings

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import KINDS, assert_states, backward, engine_of, plain_steps
from tests.dist.telling import Stories

linear = nn.functional.linear
STORIES = Stories()
UNITS = ("fsdp", "fsdp-shard_grad_op", "fsdp-no_shard")
USED = r"(?s)parameter '(first|middle|head)\.\w+' is sharded.*wrap='root'.*full_params\(\)"


def scripted(layer):
    """Computes in C++, where nothing of Python is asked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit")
        compiled = torch.jit.script(layer)
    return lambda x: compiled(x)


# Makes, from a layer, what computes as the layer does, without a look at its attributes.
KEPT = {
    "list": lambda layer: functools.partial(lambda kept, x: linear(x, *kept), list(layer.parameters())),
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


def trained(rank, key, stories, wrap=nn.Linear):
    return [trained_one(rank, key, story, wrap) for story in stories]


def trained_one(rank, key, story, wrap):
    """The state after two steps, or what the first of them was refused with, after which nothing has changed."""
    with engine_of(key, 2, build(*story), "sgd", **{"wrap": wrap} if key.startswith("fsdp") else {}) as engine:
        before = engine.full_state_dict()
        for step in range(2):
            try:
                backward(engine, step=step)
            except RuntimeError as error:
                engine.zero_grad()
                assert_states([engine.full_state_dict()], before)
                return str(error)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@functools.cache
def plain(story):
    return plain_steps(build(*story), cases.OPTIMIZERS["sgd"], 2, 0, 1)


def assert_right_or_refused(results, expected):
    """All ranks alike."""
    if any(isinstance(result, str) for result in results):
        assert all(isinstance(result, str) and re.search(USED, result) for result in results), results
    else:
        assert_states(results, expected)


# What is kept, in which layer, and whether that is frozen.
CASES = [
    *(("list", place, frozen) for place, frozen in (("first", False), ("first", True), ("middle", True))),
    *((kind, "head", False) for kind in KEPT if kind != "script"),
    *(("script", place, frozen) for place, frozen in (("first", False), ("middle", True), ("head", False))),
]


@pytest.mark.parametrize("key", [*KINDS, *UNITS[1:]])
def test_a_parameter_that_a_module_keeps_elsewhere_is_trained_or_refused_by_name(pools, key):
    for story, *results in zip(CASES, *pools(2).run(trained, key, CASES), strict=True):
        assert_right_or_refused(results, plain(story))


@pytest.mark.parametrize("key", UNITS)
def test_with_what_the_refusal_says_to_write_it_trains(pools, key):
    for story, *results in zip(CASES, *pools(2).run(trained, key, CASES, "root"), strict=True):
        assert_states(results, plain(story))


def penalty(module):
    """Of all kinds that save the parameter for backward; that of the absolute value is 0 for a NaN."""
    return 0.01 * sum((param.square() + param.abs() + param.exp()).sum() for param in module.parameters())


@STORIES.story(on=(*KINDS, *UNITS[1:], "fsdp-offload", "fsdp-hybrid"), optimizer=cases.OPTIMIZERS["sgd"], num_ranks=3)
def a_penalty_on_weights_is_computed_inside_full_params(user):
    for is_after in (True, False):
        for step in range(2):
            loss = user.loss(step) if is_after else 0
            with user.full_params() as module:
                loss = loss + penalty(module)
            user.backward(loss if is_after else loss + user.loss(step))
            user.step_and_clear()


test_stories = STORIES.told()
