"""What of a model would silently be lost when its layers are divided: refused by name, before anything is changed."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.without_ranks import SilentCommunicator
from shardlab.tensor_parallel import Column, OnSequence, OwnDropout, Row, Scatter, Vocabulary, parallelize_module
from shardlab.tensor_parallel.plan import checked


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return 4.0 * super().forward(tokens)


class HalfDropout(nn.Dropout):
    def forward(self, x):
        return x if x.shape[-1] > 4 else super().forward(x)


class LowRank(nn.Linear):
    """With parameters of its own, which a patch of its forward would use."""

    def __init__(self):
        super().__init__(8, 8)
        self.a = nn.Parameter(torch.zeros(2, 8))


class Renamed(nn.Linear):
    """Computes as torch's own."""


def patched():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


def watched(register):
    layer = nn.Linear(8, 8)
    register(layer)
    return layer


OWN_FORWARD = "'0' has a forward of its own, which its parallel form would not have; move that into a module around a"
LOST = {
    "forward of a subclass": (lambda: ScaledLinear(8, 8), Row(), OWN_FORWARD),
    "forward of an embedding": (lambda: ScaledEmbedding(8, 8), Vocabulary(), OWN_FORWARD),
    "forward of a dropout": (HalfDropout, OwnDropout(), OWN_FORWARD),
    "forward of an instance": (patched, Column(), OWN_FORWARD),
    "parameters": (LowRank, Column(), "'0' has a, which its parallel form would not have; remove"),
    "parametrization": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
        Column(),
        "'0' has parametrizations, which its parallel form would not have; remove them",
    ),
    "pruning": (
        lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
        Row(),
        "'0' has weight_orig, weight_mask, which its parallel form would not have",
    ),
    "backward hook": (
        lambda: watched(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
        Column(),
        "'0' has hooks, which its parallel form would not have; register them afterwards",
    ),
    "backward pre-hook": (
        lambda: watched(lambda layer: layer.register_full_backward_pre_hook(lambda *_: None)),
        Column(),
        "'0' has hooks, which",
    ),
    "hook before a state dict is loaded": (
        lambda: watched(lambda layer: layer.register_load_state_dict_pre_hook(lambda *_: None)),
        Column(),
        "'0' has hooks, which",
    ),
    "hook after a state dict is loaded": (
        lambda: watched(lambda layer: layer.register_load_state_dict_post_hook(lambda *_: None)),
        Row(),
        "'0' has hooks, which",
    ),
    "hook before a state dict is made": (
        lambda: watched(lambda layer: layer.register_state_dict_pre_hook(lambda *_: None)),
        Column(),
        "'0' has hooks, which",
    ),
    "hook after a state dict is made": (
        lambda: watched(lambda layer: layer.register_state_dict_post_hook(lambda *_: None)),
        Column(),
        "'0' has hooks, which",
    ),
    "hook on a parameter on parts": (
        lambda: nn.Sequential(watched(lambda layer: layer.weight.register_hook(lambda gradient: gradient.clamp(0, 1)))),
        OnSequence(),
        "'0' has hooks on the gradient of '0.0.weight', which would see a part of it; register them afterwards",
    ),
    "hook on a parameter": (
        lambda: watched(lambda layer: layer.weight.register_hook(lambda gradient: 3 * gradient)),
        Column(),
        "'0' has hooks on parameters, which",
    ),
    "hook on an accumulated gradient": (
        lambda: watched(lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda _: None)),
        Row(),
        "'0' has hooks on parameters, which",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_parallel_layer_would_lose_is_refused(name):
    make, style, message = LOST[name]
    with pytest.raises(ValueError, match=message):
        checked({"0": style}, nn.Sequential(make()), 2)


def test_a_subclass_that_computes_as_torchs_own_is_divided():
    layer = Renamed(8, 8)
    layer.weight.register_hook(lambda gradient: gradient).remove()
    assert checked({"0": Column()}, nn.Sequential(layer), 2) == {"0": Column()}


class InAList(nn.Module):
    """Calls its layers through a list."""

    def __init__(self, kind):
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
        self.steps = kind([self.up, self.relu, self.down])

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


def test_a_layer_that_a_plain_list_holds_too_is_refused_when_it_is_called():
    model = InAList(list)  # torch does not search it for modules
    parallelize_module(model, {"up": Column(), "down": Row()}, SilentCommunicator(2, 0, "tensor"))
    with pytest.raises(RuntimeError, match=r"a plain Linear was called that .* still holds it \(a list, a closure"):
        model(torch.ones(2, 8))


class OwnAttention(nn.MultiheadAttention):
    """Calls its layers, which torch's own never does."""

    def forward(self, x):
        return self.out_proj(x)


class HelpedAttention(OwnAttention):
    """Calls its layers where its forward does not name them."""

    def forward(self, x):
        return self.projected(x, "out_proj")

    def projected(self, x, name):
        return getattr(self, name)(x)


class InheritingAttention(HelpedAttention):
    """Hands on to a forward that calls its layers."""

    def forward(self, x):
        return super().forward(x)


def test_the_layers_of_an_attention_are_divided_if_its_own_forward_calls_them():
    plan = {"0.out_proj": Row()}
    for kind in (OwnAttention, HelpedAttention, InheritingAttention):
        assert checked(plan, nn.Sequential(kind(8, 2)), 2) == plan
    with pytest.raises(ValueError, match=r"'0\.out_proj' is inside of an nn\.MultiheadAttention, whose forward"):
        checked(plan, nn.Sequential(nn.MultiheadAttention(8, 2)), 2)


def test_a_layer_that_a_module_list_holds_too_is_divided():
    assert checked({"up": Column(), "down": Row()}, InAList(nn.ModuleList), 2)


UP = {"0": Column()}
ARGUMENTS = {
    "torch's order": (
        lambda model, comm: (model, comm, UP),
        "comm: a dict was given; give the tensor axis",
    ),
    "a whole mesh": (
        lambda model, comm: (model, UP, BaseMesh.alone()),
        "comm: a BaseMesh was given; give the tensor",
    ),
    "no module": (lambda model, comm: (UP, model, comm), "model: {'0': Column"),
    "one style": (
        lambda model, comm: (model, Column(), comm),
        r"plan: Column\(.*; give a mapping from names",
    ),
    "a word": (
        lambda model, comm: (model, {"0": "colwise"}, comm),
        "plan: '0' has 'colwise'; give a style, such as",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_by_name(name):
    arguments, message = ARGUMENTS[name]
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=message):
        parallelize_module(*arguments(model, SilentCommunicator(2, 0, "tensor")))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("style", [Scatter(1), OnSequence(gather_along=1)])
def test_a_tuple_is_neither_scattered_nor_gathered(style):
    model = nn.Sequential(nn.LSTM(4, 4, batch_first=True))
    parallelize_module(model, {"0": style}, SilentCommunicator(2, 0, "tensor"))
    with pytest.raises(
        ValueError, match=rf"0: {type(style).__name__}.* takes a module that returns a tensor, .* a tuple"
    ):
        model(torch.zeros(1, 2, 4))


@pytest.mark.parametrize("style", [Column(), Row(input_is_parallel=False), OwnDropout()])
def test_layers_take_their_input_by_torchs_name(style):
    layer = nn.Dropout(0.5) if isinstance(style, OwnDropout) else nn.Linear(8, 8)
    model = parallelize_module(nn.Sequential(layer), {"0": style}, SilentCommunicator(2, 0, "tensor"))
    assert model[0](input=torch.ones(2, 8)).shape == (2, 4 if isinstance(style, Column) else 8)


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_autocast_gives_the_dtype_that_torch_gives(sequence_dim):
    layer = nn.Linear(8, 8)
    row = parallelize_module(nn.Sequential(layer), {"0": Row(False, sequence_dim)}, SilentCommunicator(2, 0, "tensor"))
    with torch.autocast("cpu", torch.bfloat16):
        y = row(torch.ones(2, 8))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert torch.equal(row[0].bias.grad, torch.full((8,), float(len(y))))
