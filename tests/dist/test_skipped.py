"""What one rank leaves out: a backward, for which it sends zeros, or the sums of no_sync(), which it has cleared."""

import contextlib

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from shardlab.vocabulary import HostTransport
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states

# Where backward gathers parameters, all ranks have to call it.
NOT_GATHERED = [key for key in ENGINES if not key.startswith(("zero3", "fsdp"))]
KEYS = [*NOT_GATHERED, "fsdp-no_shard", "fsdp-no_shard-dim0", "fsdp-shard_grad_op"]
PIECES = [key for key in ENGINES if key.startswith(("zero1", "zero2"))]


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1, momentum=0.9)


def loss_of(module, kind, rank, step, num_ranks):
    x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, 0, num_ranks))
    return cases.loss_of(module(x), y)


def skipping(rank, key, kind, num_ranks, transport, has_forward):
    strategy, options = ENGINES[key]
    model = cases.build(kind, seed=rank)
    with (
        Mesh({"data": num_ranks}, transport=transport) as mesh,
        build_engine(strategy, model, sgd, mesh, **options) as engine,
    ):
        for step in range(3):
            is_skipped = step == 1 and rank == 1
            if not is_skipped or has_forward:
                loss = loss_of(engine, kind, rank, step, num_ranks)
            if not is_skipped:
                engine.backward(loss)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("transport", HostTransport)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("key", KEYS)
def test_a_rank_that_skips_a_backward_sends_zeros(pools, key, num_ranks, transport):
    kind = "SmallGPT"
    model = cases.build(kind)
    optimizer = sgd(model.parameters())
    for step in range(3):
        losses = [loss_of(model, kind, rank, step, num_ranks) for rank in range(num_ranks) if step != 1 or rank != 1]
        (sum(losses) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for has_forward in (True,) if key == "fsdp-shard_grad_op" else (True, False):
        args = (skipping, key, kind, num_ranks, str(transport), has_forward)
        assert_states(pools(num_ranks).run(*args), model.state_dict())


def clearing(rank, key, num_ranks, cleared, dtype, precision):
    strategy, options = ENGINES[key]
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine(strategy, cases.build("MLP").to(dtype), sgd, mesh, **options, precision=precision) as engine,
    ):
        for step in range(2):
            x, y = (cases.own_rows(part, rank).to(dtype) for part in cases.rows("MLP", step, 0, num_ranks))
            with engine.no_sync():
                engine.backward(cases.loss_of(engine(x), y))
            if rank in cleared:
                engine.module[2].weight.grad = None
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


# With more bits gradients add up in the bucket, and a placeholder is what the rank clears.
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, "full"), (torch.float32, Precision(reduce=torch.float64))]
)
@pytest.mark.parametrize("cleared", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("key", PIECES)
def test_what_a_rank_has_cleared_of_its_sums_is_not_sent(pools, key, cleared, dtype, precision):
    model, num_ranks = cases.build("MLP").to(dtype).double(), 3
    optimizer = sgd(model.parameters())
    for step in range(2):
        for rank in range(num_ranks):
            before = None if (grad := model[2].weight.grad) is None else grad.clone()
            (loss_of(model, "MLP", rank, step, num_ranks) / num_ranks).backward()
            if rank in cleared:
                model[2].weight.grad = before
        optimizer.step()
        optimizer.zero_grad()
    results = pools(num_ranks).run(clearing, key, num_ranks, cleared, dtype, precision)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for found in results:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name].double(), value, atol=tolerance, rtol=0)


def clearing_beside_means(rank, key, precision, what):
    strategy, options = ENGINES[key]
    with (
        Mesh({"data": 2}) as mesh,
        build_engine(strategy, cases.build("MLP"), sgd, mesh, **options, precision=precision) as engine,
    ):
        before = engine.full_state_dict()
        engine.backward(loss_of(engine, "MLP", rank, 0, 2))
        with engine.no_sync():
            engine.backward(loss_of(engine, "MLP", rank, 1, 2))
        with engine.full_params():
            for param in engine.module.parameters():
                param.grad = None if what == "cleared" else torch.ones_like(param)
        with pytest.raises(RuntimeError, match="cleared or replaced.*engine.zero_grad"):
            engine.step()
        engine.zero_grad()
        assert_states([engine.full_state_dict()], before)
        engine.backward(loss_of(engine, "MLP", rank, 2, 2))
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("what", ["cleared", "replaced"])
@pytest.mark.parametrize("precision", ["full", Precision(reduce=torch.float64)])
@pytest.mark.parametrize("key", [*PIECES, "zero3", "fsdp", "fsdp-no_shard"])
def test_sums_are_not_cleared_while_their_means_lie_elsewhere(pools, key, precision, what):
    model = cases.build("MLP")
    optimizer = sgd(model.parameters())
    (sum(loss_of(model, "MLP", rank, 2, 2) for rank in range(2)) / 2).backward()
    optimizer.step()
    assert_states(pools(2).run(clearing_beside_means, key, precision, what), model.state_dict())


def means_and_sums(rank, key, precision, clears):
    strategy, options = ENGINES[key]
    with (
        Mesh({"data": 2}) as mesh,
        build_engine(strategy, cases.build("MLP"), sgd, mesh, **options, precision=precision) as engine,
    ):
        if clears:
            engine.step()  # of nothing, after which there are no means that could stay
            with engine.no_sync():
                engine.backward(loss_of(engine, "MLP", rank, 3, 2))
            for param in engine.module.parameters():
                param.grad = None
        for step, is_last in enumerate((True, False, True)):
            with contextlib.nullcontext() if is_last else engine.no_sync():
                engine.backward(loss_of(engine, "MLP", rank, step, 2))
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("precision", ["full", Precision(reduce=torch.float64)])
@pytest.mark.parametrize("key", PIECES)
def test_means_sums_and_means_add(pools, key, precision, clears):
    model = cases.build("MLP")
    optimizer = sgd(model.parameters())
    for step in range(3):
        (sum(loss_of(model, "MLP", rank, step, 2) for rank in range(2)) / 2).backward()
    optimizer.step()
    assert_states(pools(2).run(means_and_sums, key, precision, clears), model.state_dict())


class WritesOnce(nn.Module):
    """Writes into a weight in backward, where it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7).double() for _ in range(3))
        self.writes = False

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.writes:
            x.register_hook(self.write)
        return x

    def write(self, gradient):
        with torch.no_grad():
            self.layers[0].bias.add_(1)
            self.layers[2].bias.add_(1)
        return gradient


def writing(rank, options, goes_on):
    torch.manual_seed(0)
    model = WritesOnce()
    with Mesh({"data": 2}) as mesh, build_engine("zero3", model, sgd, mesh, **options) as engine:
        x = torch.ones(2, 7, dtype=torch.float64)
        model.writes = rank == 1
        loss = engine(x).sum()
        if rank == 1:
            with pytest.raises(RuntimeError, match="written to while it was gathered"):
                engine.backward(loss)
        else:
            engine.backward(loss)
        model.writes = False
        if not goes_on:
            engine.zero_grad()
            engine.backward(engine(x).sum())
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("goes_on", [False, True])  # with the means that are there all the same
@pytest.mark.parametrize("bucket_bytes", [256, 2**20])
def test_a_rank_that_is_refused_what_it_has_written_leaves_no_other_waiting(pools, bucket_bytes, goes_on):
    torch.manual_seed(0)
    model = WritesOnce()
    model(torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    sgd(model.parameters()).step()
    assert_states(pools(2).run(writing, {"bucket_bytes": bucket_bytes}, goes_on), model.state_dict())


def replacing(rank):
    model = nn.Linear(3, 3).double()
    with Mesh({"data": 2}) as mesh, build_engine("zero3", model, sgd, mesh) as engine:

        def convert(module, *_):
            module.weight.data = module.weight.data.float()

        hook = model.register_forward_hook(convert)
        with pytest.raises(RuntimeError, match="'weight': it was written to while it was gathered"):
            engine(torch.ones(2, 3, dtype=torch.float64))
        hook.remove()
        engine.backward(engine(torch.ones(2, 3, dtype=torch.float64)).sum())
        engine.step()


def test_a_gathered_parameter_that_is_converted_is_refused(pools):
    pools(2).run(replacing)


def filler_bytes(rank, key):
    strategy, options = ENGINES[key]
    with Mesh({"data": 2}) as mesh, build_engine(strategy, cases.build("MLP"), sgd, mesh, **options) as engine:
        loss = loss_of(engine, "MLP", rank, 0, 2)
        loss.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            engine.backward(loss)
        largest = max(engine._filler(name).untyped_storage().nbytes() for name in engine.params)
        engine.zero_grad()
        return largest


@pytest.mark.parametrize("key", [*PIECES, "zero3", "fsdp"])
def test_completing_a_backward_that_ran_out_of_memory_takes_next_to_none(pools, key):
    assert pools(2).run(filler_bytes, key) == [8, 8]
