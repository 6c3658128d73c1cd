"""FSDP where something ends otherwise than planned: an exception, a write that is lost, a graph that stays alive."""

import gc
import weakref

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Collective, Role
from tests.comm.test_communicator import Log
from tests.dist.nasty import Block, Stack

SETUPS = {
    "zero3": ("zero3", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op"}),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}),
    "fsdp-small": ("fsdp", {"replicate_below": 20}),
}
of_each = pytest.mark.parametrize("setup", SETUPS)


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1)


def stack():
    torch.manual_seed(0)
    return Stack().double()


def rows(rank):
    return torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7) * (1 + rank)


def built(setup, mesh, model=None, **more):
    strategy, options = SETUPS[setup]
    return build_engine(strategy, model or stack(), sgd, mesh, **options, **more)


def gathered(engine):
    return bytes_by_role(engine.live_tensors()).get(Role.GATHERED_PARAMETER, 0)


def written_and_lost(rank, setup):
    with Mesh({"data": 2}) as mesh, built(setup, mesh) as engine:
        before = engine.full_state_dict()
        with engine.full_params() as module, torch.no_grad():
            for param in module.parameters():
                param.add_(1.0 + rank)
        return [name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])]


@of_each
def test_what_is_written_without_keep_changes_is_lost_everywhere(pools, setup):
    assert pools(2).run(written_and_lost, setup) == [[], []]


def graph_of_lost_values(rank, setup):
    with Mesh({"data": 2}) as mesh, built(setup, mesh) as engine:
        with engine.full_params() as module:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(2)
            loss = engine(rows(rank)).square().sum()
        with pytest.raises(RuntimeError, match="has changed between forward and backward"):
            engine.backward(loss)
        engine.zero_grad()


@of_each
def test_a_backward_through_values_that_were_lost_is_refused(pools, setup):
    pools(2).run(graph_of_lost_values, setup)


def rounded(rank, setup, how):
    """The gradient of the input, when parameters are back in float64, and while they are not."""
    found = []
    for is_stored in (False, True):
        with Mesh({"data": 2}) as mesh:
            engine = built(setup, mesh, precision="bf16")
            x = rows(rank).requires_grad_()
            loss = engine(x).double().square().sum()
            if not is_stored:
                (gradient,) = torch.autograd.grad(loss, x)
            elif how == "closed":
                engine.close()
                (gradient,) = torch.autograd.grad(loss, x)
            else:
                with engine.full_params():
                    (gradient,) = torch.autograd.grad(loss, x)
            found.append(gradient)
    return found


@pytest.mark.parametrize("how", ["closed", "held"])
@of_each
def test_a_gradient_is_computed_with_the_rounded_weights_of_the_forward(pools, setup, how):
    for plain, stored in pools(2).run(rounded, setup, how):
        torch.testing.assert_close(stored, plain)


def cleared_before_backward(rank):
    found = []
    for is_cleared in (False, True):
        log = Log()
        with Mesh({"data": 2}) as mesh, built("fsdp", mesh) as engine:
            for step in range(3):
                loss = engine(rows(rank)).square().sum()
                if is_cleared:
                    engine.zero_grad()
                if step == 2:
                    with mesh.observed_by(log):
                        engine.backward(loss)
                else:
                    engine.backward(loss)
                engine.step()
                engine.zero_grad()
        found.append([event.tag for event in log.events])
    return found


def test_gradients_may_be_cleared_between_forward_and_backward(pools):
    """The usual loop of torch's pages; before, nothing was prefetched in such a backward."""
    for usual, cleared in pools(2).run(cleared_before_backward):
        assert cleared == usual


def through_a_frozen_model(rank, how):
    with Mesh({"data": 2}) as mesh:
        model = stack().requires_grad_(False)
        model.blocks.extend([Block().double().requires_grad_(False) for _ in range(4)])
        model.forward = lambda x: model.leave(nn.Sequential(*model.blocks)(model.enter(x)))
        with built("fsdp", mesh, model) as engine:
            x, most = rows(rank).requires_grad_(), [0]

            def look(*_):
                most[0] = max(most[0], gathered(engine))

            loss = engine(x * 1.0).square().sum()
            for block in model.blocks:
                block.inner.register_full_backward_hook(look)
            loss = engine(x * 1.0).square().sum()
            torch.autograd.grad(loss, x) if how == "grad" else loss.backward()
            whole = sum(param.numel() * 8 for param in engine.params.values())
            return most[0] / whole, gathered(engine) / whole


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_a_backward_through_a_frozen_model_keeps_few_units(pools, how):
    for most, left in pools(2).run(through_a_frozen_model, how):
        assert most < 0.8
        assert left < 0.6


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 5)
        self.fails = True

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("planted")
        return self.inner(x)


class RaisesInAUnit(nn.Module):
    """What came before the unit that fails must not stay in memory."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Block(7), Tail()
        self.last.inner = nn.Linear(7, 5)

    def forward(self, x):
        x = self.first(x)
        self.seen.append(weakref.ref(x))
        return self.last(x * 1)


def activations_after_an_error(rank):
    model = RaisesInAUnit().double()
    model.seen = []
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", model, sgd, mesh, wrap=[Block, Tail]) as engine:
        x = rows(rank)
        try:
            engine(x)
        except ArithmeticError:
            pass
        gc.collect()
        return model.seen[0]() is None, gathered(engine)


def test_after_a_forward_that_raised_no_activation_stays(pools):
    assert pools(2).run(activations_after_an_error) == [(True, 0)] * 2


class Catches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Tail(), nn.Linear(8, 5)

    def forward(self, x):
        try:
            self.first(x)
        except ArithmeticError:
            return self.last(x)


def caught(rank):
    model = Catches().double()
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", model, sgd, mesh, wrap=[Tail]) as engine:
        engine(torch.ones(2, 8, dtype=torch.float64))
        return gathered(engine) <= sum(param.numel() * 8 for param in model.last.parameters())


def test_a_unit_whose_error_the_model_catches_is_resharded(pools):
    assert pools(2).run(caught) == [True, True]


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x, depth=2):
        if depth:
            x = self(x, depth - 1)
        return torch.tanh(self.inner(x))


def recursive(rank):
    torch.manual_seed(0)
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", CallsItself().double(), sgd, mesh, wrap="root") as engine:
        engine.backward(engine(rows(rank)).square().sum())
        engine.step()
        return engine.full_state_dict()


def test_a_module_that_calls_itself_trains_as_one_process(pools):
    torch.manual_seed(0)
    plain = CallsItself().double()
    optimizer = sgd(list(plain.parameters()))
    for rank in range(2):
        (plain(rows(rank)).square().sum() / 2).backward()
    optimizer.step()
    for found in pools(2).run(recursive):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, atol=1e-10, rtol=0)


def a_graph_kept_by_one_rank(rank, keeps):
    with Mesh({"data": 2}) as mesh, built("fsdp", mesh, precision="bf16") as engine:
        log = Log()
        kept = [engine(rows(rank))] if rank in keeps else [engine(rows(rank)).detach()]
        engine.full_state_dict()
        with mesh.observed_by(log):
            engine.backward(engine(rows(rank)).double().square().mean())
        return [event.tag for event in log.events if event.op is not Collective.ALL_REDUCE], len(kept)


@pytest.mark.parametrize("keeps", [(0,), (0, 1)])
def test_a_graph_that_a_rank_keeps_changes_nothing_that_is_sent(pools, keeps):
    usual = pools(2).run(a_graph_kept_by_one_rank, ())
    assert pools(2).run(a_graph_kept_by_one_rank, keeps) == usual


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


class Skips(nn.Module):
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
    return Skips(kind).double()


SKIPPED = [((1,), ()), ((0,), (3,)), ((0, 1, 2, 3), (2,)), ((3,), (3,)), ((), (0, 3))]


def steps_that_skip(rank, options, kind, how, accumulates):
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", skipping(kind), sgd, mesh, wrap=[kind], **options) as engine:
        for by_rank in SKIPPED:
            if accumulates:
                with engine.no_sync():
                    engine.backward(engine(rows(rank) * 2, by_rank[1 - rank]).square().mean())
            loss = engine(rows(rank), by_rank[rank]).square().mean()
            engine.backward(loss) if how == "engine" else loss.backward()
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("how", ["engine", "plain"])
@pytest.mark.parametrize("kind", [MaySkip, WithAdapter])
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 3}, {"sharding": "shard_grad_op"}, {"sharding": "no_shard"}],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)  # fmt: skip
def test_a_rank_may_use_nothing_of_a_unit_that_runs(pools, options, kind, how, accumulates):
    plain = skipping(kind)
    optimizer = sgd(list(plain.parameters()))
    for by_rank in SKIPPED:
        for rank in range(2):
            if accumulates:
                (plain(rows(rank) * 2, by_rank[1 - rank]).square().mean() / 2).backward()
            (plain(rows(rank), by_rank[rank]).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in pools(2).run(steps_that_skip, options, kind, how, accumulates):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, atol=1e-10, rtol=0)
