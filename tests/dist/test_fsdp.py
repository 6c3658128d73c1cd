"""What is special about FSDP: messages by unit and their order, and how much is gathered at once."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Collective, Role
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.every_engine import (
    adamw,
    assert_states,
    backward,
    engine_of,
    one_step,
    own_batch,
    plain_steps,
    sgd,
    shards_of,
)
from tests.dist.nasty import Block, Stack

UNITS = ("root", "blocks.0", "blocks.1", "blocks.2")


class Blocks(nn.Module):
    """A root with three equal blocks."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(8, 5)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def build(kind=Blocks):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def seeded(name, module):
    """The same numbers for a module whatever the order of initialisation."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for param in module.parameters(recurse=False):
        param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 4)


def three_steps(engine):
    for step in range(3):
        one_step(engine, step=step)
        engine.zero_grad()
    return engine.full_state_dict()


def collectives(rank, options, micro_batches, kind=Blocks):
    log = Log()
    with engine_of("fsdp", 2, build(kind), optimizer_fn=adamw, **options) as engine:
        with engine.mesh.observed_by(log):
            for _ in range(micro_batches - 1):
                with engine.no_sync():
                    backward(engine)
            one_step(engine)
        padded = sum(bucket.layout.padded_numel for bucket in shards_of(engine))
        return [(event.op, event.tag, event.numel) for event in log.events], padded


def test_collectives_of_full_shard_in_order(pools):
    forward = [f"parameters of {unit}" for unit in UNITS]
    backward = [f"parameters of {unit}" for unit in ("root", *UNITS[:0:-1])]
    reduced = [f"gradients of {unit}" for unit in (*UNITS[:0:-1], "root")]
    for prefetch in (0, 1, 2):
        for events, padded in pools(2).run(collectives, {"prefetch": prefetch}, 1):
            gathers = [tag for op, tag, _ in events if op == "all_gather"]
            assert gathers == forward + backward
            assert [tag for op, tag, _ in events if op == "reduce_scatter"] == reduced
            assert sum(numel for _, _, numel in events) == 3 * padded


class Biased(nn.Module):
    """The first block makes a bias, which all blocks add and pass on, as relative positions are in T5."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(8, 5)
        for place, block in enumerate(self.blocks):
            block.bias = nn.Parameter(torch.ones(8)) if place == 0 else None
            block.forward = MethodType(with_bias, block)

    def forward(self, x):
        x, bias = self.enter(x), None
        for block in self.blocks:
            x, bias = block(x, bias=bias)
        return self.leave(x)


def with_bias(block, x, bias):
    bias = block.bias * 2 if bias is None else bias
    return type(block).forward(block, x + bias), bias


def train_biased(rank, num_ranks, sharding):
    with engine_of("fsdp", num_ranks, build(Biased), optimizer_fn=adamw, sharding=sharding) as engine:
        return three_steps(engine)


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_what_a_unit_passes_through_does_not_gather_it_again(pools, sharding):
    gathers = 2 * len(UNITS) if sharding == "full_shard" else len(UNITS)
    for events, _ in pools(2).run(collectives, {"sharding": sharding}, 1, Biased):
        ops = [op for op, _, _ in events]
        assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (gathers, len(UNITS))
    for num_ranks in (2, 3):
        expected = plain_steps(build(Biased), adamw, num_ranks, 0, 1, 2)
        assert_states(pools(num_ranks).run(train_biased, num_ranks, sharding), expected)


def test_micro_batches_gather_twice_and_reduce_once(pools):
    for events, _ in pools(2).run(collectives, {}, 3):
        ops = [op for op, _, _ in events]
        assert ops.count("all_gather") == 2 * len(UNITS) * 3
        assert ops.count("reduce_scatter") == len(UNITS)


def test_shard_grad_op_and_no_shard(pools):
    for events, padded in pools(2).run(collectives, {"sharding": "shard_grad_op"}, 1):
        assert [op for op, _, _ in events] == ["all_gather"] * 4 + ["reduce_scatter"] * 4
        assert sum(numel for _, _, numel in events) == 2 * padded
    for events, _ in pools(2).run(collectives, {"sharding": "no_shard"}, 1):
        assert [(op, tag) for op, tag, _ in events] == [
            ("all_reduce", f"gradients of {unit}") for unit in (*UNITS[:0:-1], "root")
        ]


def gathered_peak(rank, prefetch, freeze):
    """Sampled wherever a unit computes, forward and backward."""
    samples = []
    with Mesh({"data": 2}) as mesh:
        model = build()
        model.blocks.requires_grad_(not freeze)
        engine = build_engine("fsdp", model, adamw, mesh, prefetch=prefetch)

        def sample(*_):
            samples.append(bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER])

        for block in model.blocks:
            block.inner.register_forward_hook(sample)
            block.inner.register_full_backward_pre_hook(sample)
        one_step(engine)
        block_bytes, root_bytes = (
            sum(bucket.layout.padded_numel for bucket in unit.shards) * 8 for unit in (engine.units[1], engine.units[0])
        )
        after = bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]
        return samples, root_bytes, block_bytes, after


@pytest.mark.parametrize("freeze", [False, True])
def test_gathered_parameters_stay_within_root_and_prefetch_and_one(pools, freeze):
    for prefetch in (0, 1, 2):
        for samples, root_bytes, block_bytes, after in pools(2).run(gathered_peak, prefetch, freeze):
            assert len(samples) == 6
            assert max(samples) <= root_bytes + (1 + prefetch) * block_bytes
            assert max(samples) >= root_bytes + block_bytes
            assert after == 0


def hybrid(rank, key):
    log = Log()
    with engine_of(key, 4, build(), optimizer_fn=adamw, replicate_below=0) as engine:
        with engine.mesh.observed_by(log):
            one_step(engine)
        one = [(event.axis, event.op, event.numel) for event in log.events]
        engine.zero_grad()
        for step in (1, 2):
            one_step(engine, step=step)
            engine.zero_grad()
        held = bytes_by_role(engine.live_tensors())
        return engine.full_state_dict(), held, one, [bucket.layout.padded_numel for bucket in shards_of(engine)]


@pytest.mark.parametrize("key", ["fsdp-hybrid", "fsdp-hybrid-dim0"])
def test_hybrid_shards_in_the_group_and_reduces_over_replicas(pools, key):
    results = pools(4).run(hybrid, key)
    assert_states([result[0] for result in results], plain_steps(build(), adamw, 4, 0, 1, 2))
    for _, held, one, padded in results:
        assert held[Role.PARAMETER] == 8 * sum(padded) // 2
        assert sum(n for axis, op, n in one if op == "all_reduce") == sum(padded) // 2
        assert {axis for axis, op, _ in one if op == "all_reduce"} == {"replica"}
        assert sum(n for axis, op, n in one if axis == "shard") == 3 * sum(padded)


class Scaled(nn.Module):
    """Blocks whose scales belong to the root, are recomputed in backward, and are frozen in the first block."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for place, block in enumerate(self.blocks):
            block.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=place > 0)
        self.leave = nn.Linear(8, 5)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x) * block.scale, x, use_reentrant=False)
        return self.leave(x)


def train_scaled(rank, num_ranks, sharding):
    options = {"sharding": sharding, "wrap": [nn.Linear]}
    with engine_of("fsdp", num_ranks, build(Scaled), optimizer_fn=adamw, **options) as engine:
        return three_steps(engine)


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_what_is_frozen_stays_until_its_own_backward(pools, sharding):
    """All gradients of the root are there before the first block, whose frozen scale is the root's, runs backward."""
    expected = plain_steps(build(Scaled), adamw, 3, 0, 1, 2)
    assert_states(pools(3).run(train_scaled, 3, sharding), expected)


def half_frozen():
    model = build()
    for block in model.blocks:
        block.inner.weight.requires_grad_(False)
    return model


def frozen_part(rank, key):
    log = Log()
    with engine_of(key, 2, half_frozen(), optimizer_fn=adamw) as engine, engine.mesh.observed_by(log):
        state = three_steps(engine)
        return state, {event.tag for event in log.events if event.op == "reduce_scatter"}


@pytest.mark.parametrize("key", ["fsdp", "fsdp-dim0"])
def test_frozen_weights_of_a_unit_are_gathered_but_never_reduced(pools, key):
    results = pools(2).run(frozen_part, key)
    assert_states([state for state, _ in results], plain_steps(half_frozen(), adamw, 2, 0, 1, 2))
    assert results[0][1] == {"gradients of root", *(f"gradients of blocks.{n} part 1" for n in range(3))}


def gathered(engine):
    return bytes_by_role(engine.live_tensors()).get(Role.GATHERED_PARAMETER, 0)


def cleared_or_evaluated(rank, between):
    """What the third backward sends."""
    log = Log()
    with engine_of("fsdp", 2, build(), optimizer_fn=sgd) as engine:
        for step in range(3):
            x, y = own_batch(engine, step=step)
            loss = cases.loss_of(engine(x), y)
            if between == "cleared":
                engine.zero_grad()
            log.events.clear()
            with engine.mesh.observed_by(log):
                engine.backward(loss)
            engine.step()
            engine.zero_grad()
            if between == "evaluated":
                with torch.no_grad():
                    for _ in range(2):
                        engine(x)
        return [event.tag for event in log.events]


def test_clearing_and_evaluations_leave_the_messages_of_a_backward_as_they_are(pools):
    """The usual loops of torch's pages."""
    usual, cleared, evaluated = (pools(2).run(cleared_or_evaluated, how) for how in ("", "cleared", "evaluated"))
    assert cleared == evaluated == usual


def through_a_frozen_model(rank, how):
    model = build(Stack).requires_grad_(False)
    model.blocks.extend([Block().double().requires_grad_(False) for _ in range(4)])
    model.forward = lambda x: model.leave(nn.Sequential(*model.blocks)(model.enter(x)))
    with engine_of("fsdp", 2, model, optimizer_fn=sgd) as engine:
        x, most = own_batch(engine)[0].requires_grad_(), [0]

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


def a_graph_kept_by_one_rank(rank, keeps):
    log = Log()
    with engine_of("fsdp", 2, build(Stack), optimizer_fn=sgd, precision="bf16") as engine:
        x, _ = own_batch(engine)
        kept = [engine(x)] if rank in keeps else [engine(x).detach()]
        engine.full_state_dict()
        with engine.mesh.observed_by(log):
            engine.backward(engine(x).double().square().mean())
        return [event.tag for event in log.events if event.op is not Collective.ALL_REDUCE], len(kept)


def test_a_graph_that_a_rank_keeps_changes_nothing_that_is_sent(pools):
    usual = pools(2).run(a_graph_kept_by_one_rank, ())
    for keeps in ((0,), (0, 1)):
        assert pools(2).run(a_graph_kept_by_one_rank, keeps) == usual
