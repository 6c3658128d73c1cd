"""Ranks leave other parameters of a unit out, where it is hard to tell what a backward will reach.

Each unit is reduced at one place between the gathers all the same: a rank that left a parameter out waits for none.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Skips().double()


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


class Recomputed(nn.Module):
    """Blocks under reentrant checkpointing, of which a forward may use the first one only."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.early = nn.Linear(4, 4)

    def forward(self, x, depth):
        x = self.enter(x)
        for place, block in enumerate(self.blocks[:depth]):
            x = torch.tanh(checkpoint(block, x, use_reentrant=True) if place else block(x))
        return x if depth > 1 else self.early(x)


def backward_of_two(rank, num_ranks):
    """The hook that sees a plain backward first is on the output without checkpoints."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Recomputed().double()
    mesh = Mesh({"data": num_ranks})
    with mesh, build_engine("fsdp", model, sgd, mesh) as engine:
        x = torch.ones(2, 4, dtype=torch.float64) * (rank + 1)
        (engine(x, 3).square().sum() + engine(x, 1).square().sum()).backward()
        engine.step()
        return engine.full_state_dict()


def test_a_plain_backward_through_two_outputs(pools):
    num_ranks = 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Recomputed().double()
    for rank in range(num_ranks):
        x = torch.ones(2, 4, dtype=torch.float64) * (rank + 1)
        ((model(x, 3).square().sum() + model(x, 1).square().sum()) / num_ranks).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_states(pools(num_ranks).run(backward_of_two, num_ranks), model.state_dict())


class Choosing(nn.Module):
    """A block of which some ranks leave out a layer."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skip):
        x = torch.tanh(self.always(x))
        return x if skip else self.sometimes(x)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Choosing() for _ in range(4))

    def forward(self, x, skip):
        for block in self.blocks:
            x = block(x, skip)
        return x


def chain():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Chain().double()


def refuse(_):
    raise ArithmeticError("this gradient is not wanted")


def after_a_failure(rank, num_ranks, kept):
    """One rank keeps the loss, or the output, of a forward that a backward which raised did not come to."""
    mesh, held = Mesh({"data": num_ranks}), []

    def forward(x, skip):
        output = engine(x, skip)
        held.extend([output] if kept == "output" and rank == 1 else [])
        return output

    with mesh, build_engine("fsdp", chain(), sgd, mesh) as engine:
        first, last = loss_on(rank, forward), loss_on(rank, engine)
        held.extend([first] if kept == "loss" and rank == 1 else [])
        last.register_hook(refuse)
        with pytest.raises(ArithmeticError, match="not wanted"):
            engine.backward(first + last)
        engine.zero_grad()
        del first, last
        loss_on(rank, engine).backward()
        engine.step()
        engine.zero_grad()
        # A forward that no backward follows, just before one: what is held says that it is not a part of that.
        evaluated = loss_on(rank, forward)
        del evaluated
        loss_on(rank, engine).backward()
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize(("kept", "num_ranks"), [("loss", 2), ("output", 3), ("nothing", 4)])
def test_what_a_rank_has_kept_of_other_forwards_changes_no_plain_backward(pools, kept, num_ranks):
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(loss_on(rank, model) for rank in range(num_ranks)) / num_ranks).backward()
        optimizer.step()
    assert_states(pools(num_ranks).run(after_a_failure, num_ranks, kept), model.state_dict())


SETUPS = {
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "fsdp": {},
    "fsdp shard_grad_op": {"sharding": "shard_grad_op"},
}


# Where parameters that have had another dtype get the gradients of either forward by themselves.
IN_PARTS = ("zero1", "zero2")


def around_full_params(rank, num_ranks, setup, how):
    """Parameters have their stored dtype between two forwards, and one backward goes through both."""
    options = SETUPS[setup] | {"precision": Precision(compute=torch.float32, reduce=torch.float64)}
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine(setup.split()[0], built(), sgd, mesh, **options) as engine,
    ):
        for _ in range(2):
            loss = loss_on(rank, engine)
            engine.full_state_dict()
            loss = loss + loss_on(rank + num_ranks, engine)
            is_refused = pytest.raises(RuntimeError, match="comes in parts")
            with is_refused if setup in IN_PARTS else contextlib.nullcontext():
                engine.backward(loss) if how == "engine" else loss.backward()
                engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", SETUPS)
def test_a_backward_through_forwards_before_and_after_full_params(pools, setup):
    module, num_ranks = built(), 3
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(loss_on(rank, module) + loss_on(rank + num_ranks, module) for rank in range(num_ranks)).div(
            num_ranks
        ).backward()
        optimizer.step()
    for how in ("engine", "plain"):
        states = pools(num_ranks).run(around_full_params, num_ranks, setup, how)
        assert_states(states, (built() if setup in IN_PARTS else module).state_dict(), 1e-4)


class Passed(nn.Module):
    """The last block is frozen, recomputes a part of itself, and its output is an output of the model too."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Part() for _ in range(2)).requires_grad_(False)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x, x.square()


class Part(nn.Module):
    """A part of it is under reentrant checkpointing, where no hook of the unit would gather it again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(checkpoint(self.inner, x, use_reentrant=True))


def of_both_outputs(rank, num_ranks, module):
    generator = torch.Generator().manual_seed(rank)
    first, second = module(torch.randn(3, 4, dtype=torch.float64, generator=generator))
    return (first + second).square().sum() / num_ranks


def passed(rank, num_ranks):
    torch.manual_seed(0)
    mesh = Mesh({"data": num_ranks})
    with mesh, build_engine("fsdp", Passed().double(), sgd, mesh) as engine:
        engine.backward(num_ranks * of_both_outputs(rank, num_ranks, engine))
        engine.step()
        return engine.full_state_dict()


def test_a_frozen_unit_whose_output_is_the_models_too(pools):
    num_ranks = 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Passed().double()
    sum(of_both_outputs(rank, num_ranks, model) for rank in range(num_ranks)).backward()
    torch.optim.SGD([model.enter.weight, model.enter.bias], lr=0.1).step()
    assert_states(pools(num_ranks).run(passed, num_ranks), model.state_dict())


class Branches(nn.Module):
    """Some ranks use one branch and some the other, and so only some have gathered either."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 3)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, branch):
        return self.leave(self.branches[branch](self.enter(x)))


def of_a_branch(rank, num_ranks, module):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    return module(x, rank % 2).square().sum() / num_ranks


def frozen_before_backward(rank, num_ranks, frozen):
    torch.manual_seed(0)
    mesh, options = (
        Mesh({"data": num_ranks}),
        {"sharding": "no_shard", "wrap": lambda _, module: isinstance(module, nn.Linear)},
    )
    with mesh, build_engine("fsdp", Branches().double(), sgd, mesh, **options) as engine:
        loss = num_ranks * of_a_branch(rank, num_ranks, engine)
        engine.module.get_submodule(frozen).requires_grad_(False)
        engine.backward(loss)
        engine.step()
        return engine.full_state_dict()


def test_branches_that_some_ranks_use_are_frozen_before_backward(pools):
    num_ranks, frozen = 3, "branches"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branches().double()
    loss = sum(of_a_branch(rank, num_ranks, model) for rank in range(num_ranks))
    model.get_submodule(frozen).requires_grad_(False)
    loss.backward()
    torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1).step()
    assert_states(pools(num_ranks).run(frozen_before_backward, num_ranks, frozen), model.state_dict())


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


@pytest.mark.parametrize("kind", [MaySkip, WithAdapter])
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 3}, {"sharding": "shard_grad_op"}, {"sharding": "no_shard"}], ids=str
)
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
        for how in ("engine", "plain"):
            assert_states(pools(2).run(steps_that_skip, options, kind, how, accumulates), plain.state_dict())
