"""What users do around dividing a model: part by part, references kept, writing in place, groups, torch's encoder."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.tensor_parallel import Column, OnSequence, Row, Vocabulary, parallelize_module
from tests.dist import cases
from tests.dist.every_engine import adamw, step_on


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=bias)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x):
        x = self.enter(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def rows(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def block_by_block(rank, strategy):
    """Where it began and where two steps have led, on a rank that has drawn its own weights."""
    torch.manual_seed(rank)
    model = Blocks().double()
    with Mesh({"data": 1, "tensor": 2}) as mesh:
        for block in model.blocks:
            parallelize_module(block, {"up": Column(), "down": Row()}, mesh["tensor"])
        with build_engine(strategy, model, adamw, mesh) as engine:
            begun = engine.full_state_dict()
            for step in range(2):
                step_on(engine, engine(rows(step)).square().mean())
            return begun, engine.full_state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_model_that_is_divided_part_by_part_is_the_same_on_all_tensor_ranks(pools, strategy):
    """As torch's tutorial does it; what no part has would go on as each rank has drawn it."""
    states = pools(2).run(block_by_block, strategy)
    model = Blocks().double()
    model.load_state_dict(states[0][0])
    optimizer = adamw(model.parameters())
    for step in range(2):
        model(rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for begun, ended in states:
        torch.testing.assert_close(ended, dict(model.state_dict()), atol=1e-10, rtol=0)
        torch.testing.assert_close(begun, states[0][0], atol=0, rtol=0)


def held_elsewhere(rank):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)).double()
    kept = SimpleNamespace(head=model[1])
    with Mesh({"tensor": 2}) as mesh:
        parallelize_module(model, {"1": Column(gather_output=True)}, mesh["tensor"])
        with pytest.raises(RuntimeError, match="a plain Linear was called that parallelize_module has replaced"):
            kept.head(torch.ones(2, 8, dtype=torch.float64))
        return [param is None for param in kept.head._parameters.values()]


def test_a_plain_layer_that_something_else_holds_is_refused_when_it_is_called(pools):
    """It would compute the right forward, and never train."""
    assert pools(2).run(held_elsewhere) == [[True, True]] * 2


def by_size(tensors):
    small = [tensor for tensor in tensors if tensor.numel() <= 50]
    return torch.optim.SGD([{"params": [t for t in tensors if t.numel() > 50]}, {"params": small, "lr": 0.0}], lr=1.0)


def grouped(rank, strategy):
    with Mesh({"data": 1, "tensor": 2}) as mesh:
        model = parallelize_module(Block().double(), {"up": Column(), "down": Row()}, mesh["tensor"])
        shapes = [param.shape for param in model.parameters()]
        with build_engine(strategy, model, by_size, mesh) as engine:
            sizes = [len(group["params"]) for group in engine.optimizer.param_groups]
            assert sizes == [len(group["params"]) for group in by_size(list(Block().parameters())).param_groups]
        assert [param.shape for param in model.parameters()] == shapes
        model = parallelize_module(Block().double(), {"up": Column(), "down": Row()}, mesh["tensor"])
        with build_engine(strategy, model, torch.optim.Adagrad, mesh) as engine:
            for tensor, state in engine.optimizer.state.items():
                assert state["sum"].shape == tensor.shape


def test_groups_by_size_are_those_of_the_whole_model(pools):
    """Half of a weight may be small where the weight is not."""
    for strategy in ("ddp", "zero1", "fsdp"):
        pools(2).run(grouped, strategy)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.up = nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 12)
        self.down, self.relu, self.leave = nn.Linear(12, 8, bias=False), nn.ReLU(inplace=True), nn.Linear(8, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        x += 1.0
        y = self.down(torch.tanh(self.up(self.norm(x))))
        y += x
        return self.relu(self.leave(y))


PLAN = {
    "embed": Vocabulary(sequence_dim=0), "norm": OnSequence(), "up": Column(sequence_dim=0),
    "down": Row(sequence_dim=0), "leave": OnSequence(gather_along=0),
}  # fmt: skip


def in_place(rank):
    torch.manual_seed(0)
    model = InPlace().double()
    with Mesh({"tensor": 2}) as mesh:
        output = parallelize_module(model, PLAN, mesh["tensor"])(torch.arange(4))
        output.square().sum().backward()
        return output.detach(), model.norm.weight.grad


def test_what_crosses_between_ranks_may_be_written_to_in_place(pools):
    torch.manual_seed(0)
    model = InPlace().double()
    output = model(torch.arange(4))
    output.square().sum().backward()
    for found, gradient in pools(2).run(in_place):
        torch.testing.assert_close(found, output.detach(), atol=1e-10, rtol=0)
        torch.testing.assert_close(gradient, model.norm.weight.grad, atol=1e-10, rtol=0)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double().eval()


def encoded(rank):
    """The output of what is divided; a nested tensor, which torch's fast path makes, is refused."""
    x, padding = rows(0).view(2, 2, 8), torch.arange(2) >= torch.tensor([[2], [1]])
    with Mesh({"tensor": 2}) as mesh, torch.no_grad():
        model = cases.seeded(encoder)
        parallelize_module(model, {"layers.*.linear1": Column(), "layers.*.linear2": Row()}, mesh["tensor"])
        with pytest.raises(ValueError, match=r"layers\.0\.linear1: the input is a nested tensor.*enable_nested_tens"):
            model(x, src_key_padding_mask=padding)
        return model(x)


def test_torchs_fast_path_does_not_read_slices_as_whole_weights(pools):
    """Its own modules read the weights of the layers inside instead of calling them."""
    with torch.no_grad():
        expected = cases.seeded(encoder)(rows(0).view(2, 2, 8))
    for y in pools(2).run(encoded):
        torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
