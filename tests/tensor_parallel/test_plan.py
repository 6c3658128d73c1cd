"""Plans: a user's own model in five lines, and what is refused before anything is changed."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardlab.comm.foretold import ForetoldMesh
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.models import GPT, GPTConfig

from shardlab.tensor_parallel import (  # isort: skip
    Column, OnSequence, Row, Scatter, Vocabulary, gpt_plan, load_state_dict, merge_state_dict, parallelize_module,
)  # fmt: skip
from tests.dist import cases


class Layer(nn.Module):
    """Fused query, key and value with fewer key-value heads; a gated MLP whose two inputs are fused too."""

    def __init__(self, hidden=8, head_dim=2, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.head_dim = head_dim
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, (num_heads + 2 * num_kv_heads) * head_dim)
        self.share = (num_heads, num_kv_heads, num_kv_heads)
        self.out = nn.Linear(num_heads * head_dim, hidden)
        self.gate_up = nn.Linear(hidden, 2 * 12, bias=False)
        self.down = nn.Linear(12, hidden)

    def forward(self, x):
        fused = self.qkv(self.norm(x))
        width = fused.shape[-1] // sum(self.share)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in fused.split([share * width for share in self.share], -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Own(nn.Module):
    """A user's model: two layers behind an embedding, with a buffer, one module used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = self.layers[1]
        self.register_buffer("scale", torch.rand(8))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for layer in (*self.layers, self.last):
            x = layer(x)
        return self.head(x)


PLAN = {
    "embedding": Vocabulary(),
    "layers.*.qkv": Column(parts=(8, 4, 4), head_dim=2),
    "layers.*.out": Row(),
    "layers.*.gate_up": Column(parts=(12, 12)),
    "layers.*.down": Row(),
}
ON_SEQUENCE = {
    "embedding": Vocabulary(sequence_dim=1),
    "layers.*.norm": OnSequence(),
    "layers.*.qkv": Column(parts=(8, 4, 4), head_dim=2, sequence_dim=1),
    "layers.*.out": Row(sequence_dim=1),
    "layers.*.gate_up": Column(parts=(12, 12), sequence_dim=1),
    "layers.*.down": Row(sequence_dim=1),
    "head": OnSequence(gather_along=1),
}


def build(kind, seed):
    return cases.seeded(kind, seed).double()


def step(model):
    tokens = torch.randint(0, 10, (3, 4), generator=torch.Generator().manual_seed(0))
    y = model(tokens)
    y.square().sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.01 * param.grad
    return y.detach()


def own_model(rank, plan):
    with Mesh({"tensor": 2}) as mesh:
        model = parallelize_module(build(Own, seed=rank), plan, mesh["tensor"])
        y = step(model)
        assert model.last is model.layers[1]
        merged = merge_state_dict(model, mesh["tensor"])
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load_state_dict(model, merged)
        again = merge_state_dict(model, mesh["tensor"])
        return y, merged, shapes, all(torch.equal(again[name], value) for name, value in merged.items())


@pytest.mark.parametrize("plan", [PLAN, ON_SEQUENCE], ids=["whole", "on the sequence"])
def test_a_model_of_ones_own(pools, plan):
    model = build(Own, seed=0)
    y = step(model)
    for found, merged, shapes, loaded in pools(2).run(own_model, plan):
        torch.testing.assert_close(found, y, atol=1e-12, rtol=0)
        torch.testing.assert_close(merged, dict(model.state_dict()), atol=1e-12, rtol=0)
        assert shapes["layers.0.qkv.weight"] == (8, 8)
        assert shapes["layers.0.out.weight"] == (8, 4)
        assert shapes["layers.0.out.bias"] == (8,)
        assert shapes["embedding.weight"] == (5, 8)
        assert loaded


def gpt(**sizes):
    return GPT(config(**sizes))


def config(**sizes):
    return GPTConfig(**{"vocab_size": 12, "seq_len": 8, "num_layers": 1, "num_heads": 4, "hidden": 16, **sizes})


REFUSED = [  # model, plan, what is said of it on four ranks
    (gpt, {"blocks.*.mlp.fc3": Column()}, "'blocks.*.mlp.fc3' matches no module; the model has, for exa"),
    (gpt, {"blocks.*.mlp.fc1": Column(), "blocks.0.mlp.fc1": Row()}, "both match module 'blocks.0.mlp.fc1'"),
    (gpt, {"blocks.*.mlp": Column()}, "Column takes an nn.Linear, and 'blocks.0.mlp' is a FeedForward"),
    (
        lambda: gpt(num_heads=6, hidden=24),
        gpt_plan(config(num_heads=6, hidden=24)),
        "blocks.0.attention.q_proj: heads of 4: 6 does not divide over 4 tensor-parallel ranks; use 4 or 8, or 3 ranks",
    ),
    (
        lambda: gpt(num_kv_heads=2),
        gpt_plan(config(num_kv_heads=2)),
        "blocks.0.attention.k_proj: heads of 4: 2 does not divide over 4 tensor-parallel ranks; use 4, or 2",
    ),
    (gpt, {"token_embedding": Vocabulary()}, "and 'head', whose weight is tied to it, has none"),
    (lambda: tied(nn.LayerNorm), {"*": OnSequence()}, "'weight' of '0' is tied; a tied parameter cannot work"),
    (lambda: tied(nn.Linear, 4), {"0": Column(), "1": Row()}, "'0' and '1' would be sliced differently"),
    (
        gpt,
        {"blocks.*.mlp": OnSequence(), "blocks.*.mlp.fc2": Row(sequence_dim=1)},
        "'blocks.0.mlp' is OnSequence with all that it holds; give 'blocks.0.mlp.fc2' no style",
    ),
    (gpt, {"blocks.*.mlp.fc1": Column}, "'blocks.*.mlp.fc1' has <class 'shardlab.tensor_parallel.styles.Column'>"),
    (gpt, {"blocks.*.mlp.fc1": Column(head_dim=7)}, "head_dim 7 does not divide the 64 output features"),
]


def tied(kind, *sizes):
    model = nn.Sequential(kind(4, *sizes), kind(4, *sizes))
    model[1].weight = model[0].weight
    return model


def test_refused_before_anything_is_changed():
    for make, plan, words in REFUSED:
        model = make()
        before = {key: (type(module), id(module)) for key, module in model.named_modules()}
        with pytest.raises(ValueError, match=re.escape(words)):
            parallelize_module(model, plan, ForetoldMesh({"tensor": 4}, 0)["tensor"])
        if "sliced differently" not in words:
            assert before == {key: (type(module), id(module)) for key, module in model.named_modules()}


def test_once_before_the_engine_and_what_is_frozen_or_evaluated_stays_so():
    comm, plan = ForetoldMesh({"tensor": 2}, 0)["tensor"], gpt_plan(config(), sequence_parallel=True)
    model = gpt().eval()
    model.requires_grad_(False)
    model.final_norm.requires_grad_(True)
    with (
        build_engine("single", model, lambda tensors: torch.optim.SGD(tensors, lr=0.1)),
        pytest.raises(ValueError, match="wrapped by an engine; call parallelize_module first"),
    ):
        parallelize_module(model, plan, comm)
    parallelize_module(model, plan, comm)
    with pytest.raises(ValueError, match="it is tensor parallel already"):
        parallelize_module(model, plan, comm)
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trainable == ["final_norm.weight", "final_norm.bias"]
    assert not any(module.training for module in model.modules())


def scattered(rank):
    with Mesh({"tensor": 2}) as mesh:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        parallelize_module(model, {"0": Scatter(dim=0), "1": OnSequence(gather_along=0)}, mesh["tensor"])
        plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        plain.load_state_dict(model.state_dict())
        x = torch.arange(12, dtype=torch.float64).view(4, 3)
        for either in (model, plain):
            either(x).square().sum().backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, atol=1e-12, rtol=1e-12, msg=name)


def test_scatter_and_gather_round_a_region_on_the_sequence(pools):
    pools(2).run(scattered)


class Peculiar(nn.Module):
    """Two columns that are given one tensor, but once without gradients, and once after it was written into."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            again = x.clone()
            y = self.a(again)
            y = y + self.b(again.add_(1.0))
            y = y + self.a(x)
        return y + self.b(x) + self.a(x)


def remembered(rank, sequence_dim):
    with Mesh({"tensor": 2}) as mesh:
        style = Column(gather_output=True, sequence_dim=sequence_dim)
        model = parallelize_module(build(Peculiar, seed=rank), {"a": style, "b": style}, mesh["tensor"])
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x = x if sequence_dim is None else x.chunk(2)[rank].clone()
        x.requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return y.detach(), x.grad, {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_what_crosses_an_entrance_is_never_mistaken(pools, sequence_dim):
    model = build(Peculiar, seed=0)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    results = pools(2).run(remembered, sequence_dim)
    dx = results[0][1] if sequence_dim is None else torch.cat([found for _, found, _ in results])
    torch.testing.assert_close(dx, x.grad, atol=1e-12, rtol=1e-12)
    for found, _, _ in results:
        torch.testing.assert_close(found, y.detach(), atol=1e-12, rtol=1e-12)
    for name, param in model.named_parameters():
        merged = torch.cat([gradients[name] for _, _, gradients in results])
        torch.testing.assert_close(merged, param.grad, atol=1e-12, rtol=1e-12)
