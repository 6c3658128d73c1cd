"""Figures, not verdicts: what an engine costs over the plain module, against FSDP2, and what alignment is worth."""

import statistics
from time import perf_counter_ns

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.launch import current
from shardlab.models import GPT, GPTConfig, next_token_loss

BLOCKS = 100
STEPS = 10


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=1e-3)


def gpt(num_layers, hidden):
    config = GPTConfig(vocab_size=256, seq_len=64, num_layers=num_layers, num_heads=4, hidden=hidden)
    torch.manual_seed(0)
    return GPT(config).cuda()


def median_ms(step):
    """(host, whole) time of a step: until the last call has returned, and until the device is done."""
    for _ in range(3):
        step()
    host, whole = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began_ns = perf_counter_ns()
        step()
        host.append(perf_counter_ns() - began_ns)
        torch.cuda.synchronize()
        whole.append(perf_counter_ns() - began_ns)
    return statistics.median(host) / 1e6, statistics.median(whole) / 1e6


def plain_ms(rank, num_layers, hidden, rows):
    model = gpt(num_layers, hidden)
    optimizer = sgd(model.parameters())
    tokens = torch.randint(0, 256, (rows, 65), device="cuda")

    def step():
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_ms(step)


def engine_ms(rank, strategy, num_layers, hidden, rows, options):
    model = gpt(num_layers, hidden)
    with (
        Mesh({"data": 1}, device=current().device) as mesh,
        build_engine(strategy, model, sgd, mesh, **options) as engine,
    ):
        tokens = torch.randint(0, 256, (rows, 65), device="cuda")

        def step():
            engine.backward(next_token_loss(engine(tokens[:, :-1]), tokens[:, 1:]))
            engine.step()
            engine.zero_grad()

        return median_ms(step)


@pytest.mark.parametrize("strategy", ["ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp"])
def test_overhead_of_an_engine_over_the_plain_module(gpu_pools, figure, strategy):
    size = (8, 1024, 32)
    (_, plain), (_, ours) = (
        gpu_pools(1).run(plain_ms, *size)[0],
        gpu_pools(1).run(engine_ms, strategy, *size, {})[0],
    )
    figure(f"{strategy} on one rank over the plain module", f"{ours:.2f} / {plain:.2f} ms = {ours / plain:.2f}")
    assert ours > 0


@pytest.mark.parametrize("prefetch", [1, 2])
def test_python_of_a_hundred_units(gpu_pools, figure, prefetch):
    size = (BLOCKS, 64, 1)
    ours, _ = gpu_pools(1).run(engine_ms, "fsdp", *size, {"prefetch": prefetch})[0]
    theirs, _ = gpu_pools(1).run(engine_ms, "torch_fsdp2", *size, {})[0]
    plain, _ = gpu_pools(1).run(plain_ms, *size)[0]
    figure(
        f"host time of a step of {BLOCKS} units, prefetch {prefetch}",
        f"fsdp {ours:.1f} ms, torch_fsdp2 {theirs:.1f} ms, plain module {plain:.1f} ms",
    )
    assert ours > 0


class Odd(nn.Module):
    """A parameter of ``odd`` elements before the matrices: in a flat buffer it shifts them."""

    def __init__(self, odd):
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(odd))
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x) + self.odd.sum()


def shifted_ms(rank, odd):
    model = Odd(odd).cuda()
    with (
        Mesh({"data": 1}, device=current().device) as mesh,
        build_engine("fsdp", model, sgd, mesh, precision="bf16", wrap="root") as engine,
    ):
        x = torch.randn(4096, 4096, device="cuda")

        def step():
            engine.backward(engine(x).float().square().mean())
            engine.step()
            engine.zero_grad()

        return median_ms(step)


def test_what_alignment_is_worth(gpu_pools, figure):
    (_, aligned), (_, shifted) = (gpu_pools(1).run(shifted_ms, odd)[0] for odd in (64, 3))
    figure("matrices behind a parameter of 3 elements, against 64", f"{shifted:.2f} / {aligned:.2f} ms")
    assert aligned > 0
