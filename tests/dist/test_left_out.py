"""Ranks leave other parameters of a unit out, where it is hard to tell what a backward will reach.

Each unit is reduced at one place between the gathers all the same: a rank that left a parameter out waits for none.
"""

import copy

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from tests.dist import cases
from tests.dist.every_engine import assert_states, engine_of, sgd


class Double(torch.autograd.Function):
    """A function in Python that runs no backward inside its own."""

    runs_no_backward = True

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Skips(nn.Module):
    """Blocks that are used twice in a forward, and layers of the root that some ranks skip."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.sometimes, self.leave = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, skip):
        x = self.enter(x)
        for block in (*self.blocks, *self.blocks):
            x = Double.apply(torch.tanh(block(x)))
        return self.leave(x if skip else self.sometimes(x))


def built():
    return cases.seeded(Skips).double()


def loss_on(rank, module):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    return module(x, rank % 2 == 1).double().square().sum()


def stepped(rank, num_ranks, options, between, how):
    mesh = Mesh({"data": num_ranks})
    with mesh, build_engine("fsdp", built(), sgd, mesh, **options) as engine:
        for _ in range(2):
            loss = loss_on(rank, engine)
            if between:
                with engine.full_params():  # in another dtype than the forward's, under mixed precision
                    pass
            loss.backward() if how == "plain" else engine.backward(loss)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


def expected(num_ranks, dtype):
    """One process that rounds where mixed precision does: a copy in ``dtype`` computes, float64 is stepped."""
    master = built()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.1)
    for _ in range(2):
        for param in master.parameters():
            param.grad = torch.zeros_like(param)
        for rank in range(num_ranks):
            replica = copy.deepcopy(master).to(dtype)
            replica.zero_grad()
            loss_on(rank, lambda x, skip, replica=replica: replica(x.to(dtype), skip)).backward()
            for param, own in zip(master.parameters(), replica.parameters(), strict=True):
                param.grad += 0 if own.grad is None else own.grad.double() / num_ranks
        optimizer.step()
    return master.state_dict()


@pytest.mark.parametrize("how", ["engine", "plain"])
@pytest.mark.parametrize(("compute", "num_ranks"), [(torch.float64, 3), (torch.float32, 4)])
def test_equals_one_process(pools, num_ranks, compute, how):
    precision = Precision(compute, torch.float64, torch.float64)
    for wrap, between in (("auto", False), ("auto", True), ("root", True)):
        options = {"wrap": wrap, "precision": precision}
        results = pools(num_ranks).run(stepped, num_ranks, options, between, how)
        assert_states(results, expected(num_ranks, compute))


class MaySkip(nn.Module):
    """A block that runs on every rank, and of which a rank may use nothing."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, skips):
        return x if skips else x + torch.tanh(self.inner(x))


class WithAdapter(MaySkip):
    """As an adapter on a frozen layer, which the others' gradients go through."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x, skips):
        return super().forward(self.frozen(x), skips)


class SkipsBlocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.enter, self.leave = nn.Linear(7, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x, skipped):
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x, index in skipped)
        return self.leave(x)


def skipping(kind):
    torch.manual_seed(0)
    return SkipsBlocks(kind).double()


SKIPPED = [((1,), ()), ((0,), (3,)), ((0, 1, 2, 3), (2,)), ((3,), (3,)), ((), (0, 3))]


def rows_of_rank(rank):
    return torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7) * (1 + rank)


def steps_that_skip(rank, options, kind, how, accumulates):
    with engine_of("fsdp", 2, skipping(kind), optimizer_fn=sgd, wrap=[kind], **options) as engine:
        for by_rank in SKIPPED:
            x = rows_of_rank(rank)
            if accumulates:
                with engine.no_sync():
                    engine.backward(engine(x * 2, by_rank[1 - rank]).square().mean())
            loss = engine(x, by_rank[rank]).square().mean()
            engine.backward(loss) if how == "engine" else loss.backward()
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, MaySkip), ({}, WithAdapter), ({"prefetch": 0}, MaySkip), ({"prefetch": 3}, WithAdapter),
        ({"sharding": "shard_grad_op"}, WithAdapter), ({"sharding": "no_shard"}, MaySkip),
    ],
    ids=str,
)  # fmt: skip
def test_a_rank_may_use_nothing_of_a_unit_that_runs(pools, options, kind):
    for accumulates in (False, True):
        plain = skipping(kind)
        optimizer = sgd(list(plain.parameters()))
        for by_rank in SKIPPED:
            for rank in range(2):
                x = rows_of_rank(rank)
                if accumulates:
                    (plain(x * 2, by_rank[1 - rank]).square().mean() / 2).backward()
                (plain(x, by_rank[rank]).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        how = "plain" if accumulates == (kind is MaySkip) else "engine"
        assert_states(pools(2).run(steps_that_skip, options, kind, how, accumulates), plain.state_dict())
