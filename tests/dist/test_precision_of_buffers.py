"""16-bit parameters beside float32 buffers: units take what has been promoted, and what cannot work says why."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from tests.dist import cases
from tests.dist.every_engine import adamw
from tests.dist.nasty import Block


class Promotes(nn.Module):
    """A float32 buffer between two units makes the activations float32, as a table of positions does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 8), Block(), Block(), nn.Linear(8, 5)])
        self.register_buffer("positions", torch.linspace(0, 1, 8))

    def forward(self, x):
        first, *inner, last = self.blocks
        x = first(x) + self.positions
        for block in inner:
            x = block(x=x) + self.positions
        return last(x)


class PromotesInside(nn.Module):
    """The same inside a unit, here the root."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.last = nn.Linear(8, 5)
        self.register_buffer("positions", torch.linspace(0, 1, 8))

    def forward(self, x):
        return self.last(self.first(x) + self.positions)


def normalised():
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


MODELS = {"Promotes": Promotes, "PromotesInside": PromotesInside, "BatchNorm": normalised}


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


class InUnits(Promotes):
    """The same with the casts written out."""

    def forward(self, x):
        first, *inner, last = self.blocks
        x = first(x) + self.positions
        for block in inner:
            x = block(x.bfloat16()) + self.positions
        return last(x.bfloat16())


def test_a_float32_buffer_between_units_is_taken(pools):
    """Against per-rank 16-bit copies in one process, gradients summed in float32."""
    master = build("Promotes")
    optimizer = adamw(list(master.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            copy = InUnits()
            copy.load_state_dict(master.state_dict())
            for param in copy.parameters():
                param.data = param.bfloat16()
            x, y = rows(rank, step)
            cases.loss_of(copy(x.bfloat16()).float(), y).backward()
            for param, of_copy in zip(master.parameters(), copy.parameters(), strict=True):
                gradient = of_copy.grad.float() / 2
                param.grad = gradient if param.grad is None else param.grad + gradient
        optimizer.step()
    for state, dtype in pools(2).run(train, "Promotes", "bf16", 3):
        assert dtype == torch.float32
        for name, value in master.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)


def told(rank, kind, wrap):
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("fsdp", build(kind), adamw, mesh, precision="bf16", wrap=wrap)
        x, _ = rows(rank, 0)
        with pytest.raises(RuntimeError, match="dtype|scalar type") as caught:
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


def told_of_other_things(rank):
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", build("Promotes"), adamw, mesh, precision="bf16") as engine:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            engine(torch.ones(2, 3))
        return getattr(caught.value, "__notes__", [])


def test_other_errors_stay_as_they_are(pools):
    assert pools(2).run(told_of_other_things) == [[], []]
