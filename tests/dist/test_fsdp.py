"""What is special about FSDP: collectives by unit, how much is gathered at once, hybrid meshes, nasty modules."""

from dataclasses import dataclass
from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.test_engines import adamw, one_step

UNITS = ("root", "blocks.0", "blocks.1", "blocks.2")


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


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


def batch(rank, num_ranks, step=0):
    return tuple(cases.own_rows(part, rank) for part in cases.rows("MLP", step, 0, num_ranks))


def reference(kind, num_ranks, steps, loss_of=cases.loss_of):
    model = build(kind)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    for step in range(steps):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_states(states, expected):
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


def collectives(rank, options, micro_batches, kind=Blocks):
    log = Log()
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", build(kind), adamw, mesh, **options) as engine:
        with mesh.observed_by(log):
            for micro_batch in range(micro_batches):
                x, y = batch(rank, 2)
                if micro_batch < micro_batches - 1:
                    with engine.no_sync():
                        engine.backward(cases.loss_of(engine(x), y))
                else:
                    engine.backward(cases.loss_of(engine(x), y))
            engine.step()
        padded = sum(bucket.layout.padded_numel for bucket in engine.buckets)
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
    mesh = Mesh({"data": num_ranks})
    with mesh, build_engine("fsdp", build(Biased), adamw, mesh, sharding=sharding) as engine:
        for step in range(3):
            x, y = batch(rank, num_ranks, step)
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_what_a_unit_passes_through_does_not_gather_it_again(pools, sharding):
    gathers = 2 * len(UNITS) if sharding == "full_shard" else len(UNITS)
    for events, _ in pools(2).run(collectives, {"sharding": sharding}, 1, Biased):
        ops = [op for op, _, _ in events]
        assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (gathers, len(UNITS))
    for num_ranks in (2, 3):
        states = pools(num_ranks).run(train_biased, num_ranks, sharding)
        assert_states(states, reference(Biased, num_ranks, 3))


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
        one_step(engine, rank)
        block_bytes, root_bytes = (
            sum(bucket.layout.padded_numel for bucket in unit.buckets) * 8
            for unit in (engine.units[1], engine.units[0])
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


def hybrid(rank, strategy_options, axes, num_ranks):
    log = Log()
    with Mesh(axes) as mesh, build_engine("fsdp", build(), adamw, mesh, **strategy_options) as engine:
        for step in range(5):
            x, y = (
                part[engine.data_rank * 2 : engine.data_rank * 2 + 2] for part in cases.rows("MLP", step, 0, num_ranks)
            )
            with mesh.observed_by(log):
                engine.backward(cases.loss_of(engine(x), y))
                engine.step()
            engine.zero_grad()
        held = bytes_by_role(engine.live_tensors())
        events = [(event.axis, event.op, event.numel) for event in log.events]
        return engine.full_state_dict(), held, events, [bucket.layout.padded_numel for bucket in engine.buckets]


def test_hybrid_shards_in_the_group_and_reduces_over_replicas(pools):
    expected = reference(Blocks, 4, 5)
    for layout in ("flat", "dim0"):
        options = {"sharding": "hybrid_shard", "layout": layout}
        results = pools(4).run(hybrid, options, {"replica": 2, "shard": 2}, 4)
        assert_states([result[0] for result in results], expected)
        for _, held, events, padded in results:
            assert held[Role.PARAMETER] == 8 * sum(padded) // 2
            one = events[: len(events) // 5]
            assert sum(n for axis, op, n in one if op == "all_reduce") == sum(padded) // 2
            assert {axis for axis, op, _ in one if op == "all_reduce"} == {"replica"}
            assert sum(n for axis, op, n in one if axis == "shard") == 3 * sum(padded)


class Nasty(nn.Module):
    """A unit used twice, a checkpointed block with dropout, a dict inside a dataclass as output."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.5)
        self.leave = nn.Linear(8, 5)

    def forward(self, x):
        x = self.enter(x)
        x = self.blocks[0](x)
        x = checkpoint(lambda value: self.drop(self.blocks[1](value)), x, use_reentrant=False)
        x = self.blocks[0](x)
        return Output({"y": self.leave(x)}, "a note")


@dataclass
class Output:
    parts: dict
    note: str


def nasty_loss(output, y):
    return nn.functional.mse_loss(output.parts["y"], y)


def train_nasty(rank, options, same_rows):
    """With dropout every rank computes the same rows from the same seed, so one process can be the reference."""
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", build(Nasty), adamw, mesh, **options) as engine:
        for step in range(4):
            torch.manual_seed(step)
            x, y = cases.rows("MLP", step, 0, 1)
            engine.backward(nasty_loss(engine(x), y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"layout": "dim0", "prefetch": 0}, {"sharding": "shard_grad_op"}, {"wrap": 60}]
)
def test_used_twice_checkpointed_with_dropout_custom_output(pools, options):
    model = build(Nasty)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    for step in range(4):
        torch.manual_seed(step)
        x, y = cases.rows("MLP", step, 0, 1)
        nasty_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_states(pools(2).run(train_nasty, options, True), model.state_dict())


def two_forwards(rank):
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", build(), adamw, mesh) as engine:
        x, y = batch(rank, 2)
        loss = cases.loss_of(engine(x), y) + cases.loss_of(engine(x * 2), y)
        engine.backward(loss)
        engine.step()
        return engine.full_state_dict()


def test_two_forwards_before_one_backward(pools):
    model = build()
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    x, y = cases.rows("MLP", 0, 0, 2)
    (cases.loss_of(model(x), y) + cases.loss_of(model(x * 2), y)).backward()
    optimizer.step()
    assert_states(pools(2).run(two_forwards), model.state_dict())


def by_hand(rank):
    with Mesh({"data": 2}) as mesh:
        model = build()
        engine = build_engine("fsdp", model, adamw, mesh)
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.inner\.weight' is sharded"):
            _ = model.blocks[1].inner.weight + 1
        engine.unshard("blocks.1")
        direct = model.blocks[1](torch.ones(1, 8).double())
        engine.reshard("blocks.1")
        with pytest.raises(ValueError, match="unit: 'blocks'"):
            engine.unshard("blocks")
        with pytest.raises(RuntimeError, match="mat1"):
            engine(torch.ones(2, 3).double())
        left = bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]
        engine.close()
        alone = model(torch.ones(1, 7).double())
        return direct.detach(), left, alone.detach()


def test_units_by_hand_errors_and_close(pools):
    model = build()
    for direct, left, alone in pools(2).run(by_hand):
        assert torch.equal(direct, model.blocks[1](torch.ones(1, 8).double()).detach())
        assert left == 0
        torch.testing.assert_close(alone, model(torch.ones(1, 7).double()).detach(), atol=1e-12, rtol=0)


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
    def wrap(name, module):
        return isinstance(module, nn.Linear)

    mesh = Mesh({"data": num_ranks})
    with mesh, build_engine("fsdp", build(Scaled), adamw, mesh, sharding=sharding, wrap=wrap) as engine:
        for step in range(3):
            one_step(engine, rank, step=step)
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_what_is_frozen_stays_until_its_own_backward(pools, sharding):
    """All gradients of the root are there before the first block, whose frozen scale is the root's, runs backward."""
    for num_ranks in (2, 3):
        states = pools(num_ranks).run(train_scaled, num_ranks, sharding)
        assert_states(states, reference(Scaled, num_ranks, 3))


def frozen_part(rank, options):
    log = Log()
    with Mesh({"data": 2}) as mesh:
        model = build()
        for block in model.blocks:
            block.inner.weight.requires_grad_(False)
        with build_engine("fsdp", model, adamw, mesh, **options) as engine:
            for step in range(3):
                with mesh.observed_by(log):
                    one_step(engine, rank, step=step)
                engine.zero_grad()
            reduced = {event.tag for event in log.events if event.op == "reduce_scatter"}
            return engine.full_state_dict(), reduced


def test_frozen_weights_of_a_unit_are_gathered_but_never_reduced(pools):
    model = build()
    for block in model.blocks:
        block.inner.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    for step in range(3):
        x, y = cases.rows("MLP", step, 0, 2)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for options in ({}, {"layout": "dim0"}):
        results = pools(2).run(frozen_part, options)
        assert_states([state for state, _ in results], model.state_dict())
        assert results[0][1] == {"gradients of root", *(f"gradients of blocks.{n} part 1" for n in range(3))}


def misuse(rank):
    fields = []
    with Mesh({"data": 2}) as mesh:
        for options in ({"sharding": "half"}, {"layout": "dim1"}, {"prefetch": -1}, {"wrap": "layer"}, {"wrap": 0}):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                build_engine("fsdp", build(), adamw, mesh, **options)
            fields.append(str(caught.value).partition(":")[0])
        with pytest.raises(ValueError, match="axis: 'replica' is not on this mesh"):
            build_engine("fsdp", build(), adamw, mesh, sharding="hybrid_shard")
        with pytest.raises(ValueError, match="partition: Adafactor"):
            build_engine("fsdp", build(), lambda tensors: torch.optim.Adafactor(tensors), mesh)
    return fields


def test_misuse_names_the_field(pools):
    assert pools(2).run(misuse) == [["sharding", "layout", "prefetch", "wrap", "wrap"]] * 2


def seeded(name, module):
    """The same numbers for a module whatever the order of initialisation."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for param in module.parameters(recurse=False):
        param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 4)


def from_meta(rank, layout):
    largest = []

    def init(name, module):
        seeded(name, module)
        if rank == 1:  # the ranks differ, and must not in the end
            for param in module.parameters(recurse=False):
                param.zero_()
        # (A placeholder answers with the device of the parameter that it stands for, and has no memory.)
        largest.append(sum(one.numel() for one in model.parameters() if type(one) is nn.Parameter and not one.is_meta))

    with torch.device("meta"):
        model = Blocks().double()
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", model, adamw, mesh, init_fn=init, layout=layout) as engine:
        for step in range(3):
            one_step(engine, rank, step=step)
            engine.zero_grad()
        return engine.full_state_dict(), max(largest)


def test_a_model_on_the_meta_device_is_built_unit_by_unit(pools):
    model = Blocks().double()
    with torch.no_grad():
        for name, module in model.named_modules():
            seeded(name, module)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    for step in range(3):
        x, y = cases.rows("MLP", step, 0, 2)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    numel = sum(param.numel() for param in model.parameters())
    for layout in ("flat", "dim0"):
        results = pools(2).run(from_meta, layout)
        assert_states([state for state, _ in results], model.state_dict())
        assert all(largest < numel / 2 for _, largest in results), "never the whole model at once"


def meta_misuse(rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), Block())
        own = nn.Module()
        own.weight = nn.Parameter(torch.empty(3))
    with Mesh({"data": 2}) as mesh:
        with pytest.raises(ValueError, match=r"model: '0\.weight' and 3 more parameters are on the meta"):
            build_engine("zero3", model, adamw, mesh)
        with pytest.raises(ValueError, match=r"init_fn: module '' \(Module\)"):
            build_engine("fsdp", own, adamw, mesh)
        model.register_buffer("table", torch.empty(3, device="meta"))
        with pytest.raises(ValueError, match=r"model: buffer 'table' is on the meta device; create buffers on the"):
            build_engine("fsdp", model, adamw, mesh)
    return True


def test_meta_misuse_is_named(pools):
    assert pools(2).run(meta_misuse) == [True, True]


class ScaledRows(nn.Module):
    """Beside a matrix, which dim0 gathers in stretches, parameters that stay in one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.float64))
        self.row = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.T * self.scale + (x * self.row).sum()


def gathered_by_rows(rank):
    with (
        Mesh({"data": 2}) as mesh,
        build_engine("fsdp", ScaledRows(), adamw, mesh, layout="dim0") as engine,
    ):
        engine.unshard("root")
        held = bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]
        engine.reshard("root")
        return held


def test_by_rows_what_stays_in_one_stretch_keeps_no_buffer_beside_the_copies(pools):
    assert pools(2).run(gathered_by_rows) == [(24 + 4 + 1) * 8] * 2
