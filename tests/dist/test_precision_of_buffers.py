"""16-bit parameters beside float32 buffers: what cannot work says why."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from tests.dist import cases
from tests.dist.every_engine import adamw


class PromotesInside(nn.Module):
    """A float32 buffer inside a unit, here the root, makes activations float32, as a table of positions does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.last = nn.Linear(8, 5)
        self.register_buffer("positions", torch.linspace(0, 1, 8))

    def forward(self, x):
        return self.last(self.first(x) + self.positions)


def normalised():
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


MODELS = {"PromotesInside": PromotesInside, "BatchNorm": normalised}


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[kind]()


def rows(rank, step):
    return (cases.own_rows(part, rank).float() for part in cases.rows("MLP", step, 0, 2))


def train(rank, kind, precision, steps, wrap="auto"):
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("fsdp", build(kind), adamw, mesh, precision=precision, wrap=wrap)
        for step in range(steps):
            x, y = rows(rank, step)
            output = engine(x)
            engine.backward(cases.loss_of(output, y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict(), output.dtype


def told(rank, kind, wrap):
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("fsdp", build(kind), adamw, mesh, precision="bf16", wrap=wrap)
        x, _ = rows(rank, 0)
        with pytest.raises(RuntimeError, match=r"dtype|scalar type") as caught:
            engine(x)
        engine.full_state_dict()  # and nothing hangs afterwards
        return caught.value.__notes__


@pytest.mark.parametrize(
    ("kind", "wrap", "buffer"),
    [
        ("PromotesInside", "root", "'positions' (torch.float32)"),
        ("BatchNorm", "auto", "'1.running_mean' (torch.float32), '1.running_var' (torch.float32)"),
    ],
)
def test_inside_a_unit_the_error_names_the_buffers_and_the_way_out(pools, kind, wrap, buffer):
    for (note,) in pools(2).run(told, kind, wrap):
        assert buffer in note
        assert "buffers=torch.bfloat16" in note
    half = Precision(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    for state, dtype in pools(2).run(train, kind, half, 2, wrap):
        assert dtype == torch.float32
        assert all(bool(value.isfinite().all()) for value in state.values())
