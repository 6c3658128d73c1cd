"""What of a model would silently be lost when its layers are divided: refused by name, before anything is changed."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.foretold import ForetoldMesh
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
    """No more than another name."""


def changed(change):
    change(layer := nn.Linear(8, 8))
    return layer


def clamped(gradient):
    return gradient.clamp(0, 1)


OWN_FORWARD = "'0' has a forward of its own, which its parallel form would not have; move that into a module around a"
HOOKS = "'0' has hooks, which its parallel form would not have; register"
ON_PARAMETERS = "'0' has hooks on parameters, which"
LOST = [
    (lambda: ScaledLinear(8, 8), Row(), OWN_FORWARD),
    (lambda: ScaledEmbedding(8, 8), Vocabulary(), OWN_FORWARD),
    (HalfDropout, OwnDropout(), OWN_FORWARD),
    (lambda: changed(lambda layer: setattr(layer, "forward", abs)), Column(), OWN_FORWARD),
    (LowRank, Column(), "'0' has a, which its parallel form would not have; remove"),
    (lambda: changed(parametrizations.weight_norm), Column(), "'0' has parametrizations, which its parallel form"),
    (lambda: changed(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)), Row(),
     "'0' has weight_orig, weight_mask, which its"),
    *((lambda kind=kind: changed(lambda layer: getattr(layer, f"register_{kind}_hook")(clamped)), Column(), HOOKS)
      for kind in ("forward", "full_backward", "full_backward_pre", "state_dict_pre", "state_dict_post",
                   "load_state_dict_pre", "load_state_dict_post")),
    (lambda: changed(lambda layer: layer.weight.register_hook(clamped)), Column(), ON_PARAMETERS),
    (lambda: changed(lambda layer: layer.bias.register_post_accumulate_grad_hook(clamped)), Row(), ON_PARAMETERS),
    (lambda: nn.Sequential(changed(lambda layer: layer.weight.register_hook(clamped))), OnSequence(),
     "'0' has hooks on the gradient of '0.0.weight', which would see a part of it; register them afterwards"),
]  # fmt: skip


def test_what_a_parallel_layer_would_lose_is_refused():
    for make, style, message in LOST:
        with pytest.raises(ValueError, match=message):
            checked({"0": style}, nn.Sequential(make()), 2)
    layer = Renamed(8, 8)  # computes as torch's own
    layer.weight.register_hook(lambda gradient: gradient).remove()
    assert checked({"0": Column()}, nn.Sequential(layer), 2) == {"0": Column()}


class OwnAttention(nn.MultiheadAttention):
    """Calls its layers, which torch's own never does."""

    def forward(self, x):
        return self.out_proj(x)


def test_the_layers_of_an_attention_are_divided_if_its_own_forward_calls_them():
    plan = {"0.out_proj": Row()}
    assert checked(plan, nn.Sequential(OwnAttention(8, 2)), 2) == plan
    with pytest.raises(ValueError, match=r"'0\.out_proj' is inside of an nn\.MultiheadAttention, whose forward"):
        checked(plan, nn.Sequential(nn.MultiheadAttention(8, 2)), 2)


ARGUMENTS = {  # what is said of model, plan and communicator
    "comm: a dict was given; give the tensor axis": lambda model, comm: (model, comm, {"0": Column()}),
    "comm: a BaseMesh was given; give the tensor": lambda model, comm: (model, {"0": Column()}, BaseMesh.alone()),
    "model: {'0': Column": lambda model, comm: ({"0": Column()}, model, comm),
    r"plan: Column\(.*; give a mapping from names": lambda model, comm: (model, Column(), comm),
    "plan: '0' has 'colwise'; give a style, such as": lambda model, comm: (model, {"0": "colwise"}, comm),
}


def test_arguments_that_do_not_fit_are_refused_by_name():
    for message, arguments in ARGUMENTS.items():
        model = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(ValueError, match=message):
            parallelize_module(*arguments(model, ForetoldMesh({"tensor": 2}, 0)["tensor"]))
        assert type(model[0]) is nn.Linear


def test_a_tuple_is_neither_scattered_nor_gathered():
    for style in (Scatter(1), OnSequence(gather_along=1)):
        model = nn.Sequential(nn.LSTM(4, 4, batch_first=True))
        parallelize_module(model, {"0": style}, ForetoldMesh({"tensor": 2}, 0)["tensor"])
        with pytest.raises(ValueError, match=f"0: {type(style).__name__}.* takes a module that returns a tensor"):
            model(torch.zeros(1, 2, 4))


def test_layers_take_their_input_by_torchs_name():
    for style in (Column(), Row(input_is_parallel=False), OwnDropout()):
        layer = nn.Dropout(0.5) if isinstance(style, OwnDropout) else nn.Linear(8, 8)
        model = parallelize_module(nn.Sequential(layer), {"0": style}, ForetoldMesh({"tensor": 2}, 0)["tensor"])
        assert model[0](input=torch.ones(2, 8)).shape == (2, 4 if isinstance(style, Column) else 8)


def test_autocast_gives_the_dtype_that_torch_gives():
    for sequence_dim in (None, 0):
        style = Row(False, sequence_dim)
        row = parallelize_module(nn.Sequential(nn.Linear(8, 8)), {"0": style}, ForetoldMesh({"tensor": 2}, 0)["tensor"])
        with torch.autocast("cpu", torch.bfloat16):
            y = row(torch.ones(2, 8))
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert torch.equal(row[0].bias.grad, torch.full((8,), float(len(y))))
