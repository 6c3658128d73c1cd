"""What a unit of FSDP is: every kind of ``wrap``, from the meta device, by hand, and where ranks use other ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardlab import Mesh, build_engine, show_units
from shardlab.engines.peers.torch_fsdp2 import TorchFSDP2
from shardlab.launch import RankError
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.units import wrapped_modules
from shardlab.vocabulary import Role
from tests.comm.test_communicator import Log
from tests.dist.every_engine import adamw, assert_states, engine_of, momentum, plain_steps, step_on
from tests.dist.nasty import Block, Deep
from tests.dist.test_fsdp import build, seeded, three_steps
from tests.units.look_alikes import GPT2, Residual

WRAPS = {
    "auto": "auto",
    "root": "root",
    "a pattern": "transformer.h.*",
    "patterns": ("transformer.h.[02]", "transformer.h.*.up", "transformer.ln_f"),
    "a class": Residual,
    "classes": (Residual, torch.nn.Linear),
    "a number": 144,
    "a function": lambda name, _: name.endswith(("1", "down")),
}


def loss_of(model, rows):
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rows_of(step, num_rows=4):
    return torch.randint(11, (num_rows, 6), generator=torch.Generator().manual_seed(step))


def train(rank, wrap, make):
    log = Log()
    with Mesh({"data": 2}) as mesh, make(build(GPT2), adamw, mesh, wrap=wrap) as engine:
        for step in range(2):
            with mesh.observed_by(log):
                engine.backward(loss_of(engine, rows_of(step)[2 * rank : 2 * rank + 2]))
                engine.step()
            engine.zero_grad()
        return engine.full_state_dict(), {event.tag for event in log.events if event.op == "all_gather"}


def fsdp(*args, **options):
    return build_engine("fsdp", *args, **options)


def test_every_kind_of_units_equals_one_process(pools):
    model = build(GPT2)
    optimizer = adamw(list(model.parameters()))
    for step in range(2):
        loss_of(model, rows_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for wrap in WRAPS.values():
        results = pools(2).run(train, wrap, fsdp)
        assert_states([state for state, _ in results], model.state_dict())
        table = show_units(model, wrap)
        units = table.loc[table["parameters"] > 0, "unit"]
        assert results[0][1] == {f"parameters of {unit}" for unit in units}


def test_torchs_own_takes_the_same_units(pools):
    for wrap in ("auto", "transformer.h.*.up"):
        for _, tags in pools(2).run(train, wrap, TorchFSDP2):
            assert len(tags) == 2 * (1 + len(wrapped_modules(build(GPT2), wrap)))  # for forward and for backward


def outside(rank):
    with Mesh({"data": 2}) as mesh:
        model = build()
        engine = build_engine("fsdp", model, adamw, mesh)
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.inner\.weight' is sharded"):
            _ = model.blocks[1].inner.weight + 1
        with pytest.raises(RuntimeError, match="mat1"):
            engine(torch.ones(2, 3).double())
        left = bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]
        engine.close()
        alone = model(torch.ones(1, 7).double())
        return left, alone.detach()


def test_units_outside_the_engine_errors_and_close(pools):
    model = build()
    for left, alone in pools(2).run(outside):
        assert left == 0
        torch.testing.assert_close(alone, model(torch.ones(1, 7).double()).detach(), atol=1e-12, rtol=0)


def from_meta(rank, layout):
    largest = []

    def init(name, module):
        seeded(name, module)
        if rank == 1:  # the ranks differ, and must not in the end
            for param in module.parameters(recurse=False):
                param.zero_()
        # (What is sharded has its shape, in the memory of one element.)
        largest.append(sum(one.untyped_storage().nbytes() for one in model.parameters() if not one.is_meta))

    with torch.device("meta"):
        model = Deep().double()
    with engine_of("fsdp", 2, model, optimizer_fn=adamw, init_fn=init, layout=layout) as engine:
        return three_steps(engine), max(largest)


def test_a_model_on_the_meta_device_is_built_unit_by_unit(pools):
    model = Deep().double()
    with torch.no_grad():
        for name, module in model.named_modules():
            seeded(name, module)
    num_bytes = sum(param.nbytes for param in model.parameters())
    expected = plain_steps(model, adamw, 2, 0, 1, 2)
    for layout in ("flat", "dim0"):
        results = pools(2).run(from_meta, layout)
        assert_states([state for state, _ in results], expected)
        assert all(largest < num_bytes / 2 for _, largest in results), "never the whole model at once"


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


class Branches(nn.Module):
    """Blocks of one size, each a unit; a rank uses the one it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x, order):
        x = self.enter(x)
        for number in order:
            x = self.blocks[number](x)
        return x


ORDERS = [(0, 1), (1, 0), (2,), (0, 2, 1)]


def branches_of(rank, num_ranks, step, module):
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return module(x, ORDERS[(rank + step) % len(ORDERS)]).square().mean()


def other_units(rank, num_ranks, transport, options):
    """Of which each rank uses others, in other orders."""
    with Mesh({"data": num_ranks}, transport=transport) as mesh:
        engine = build_engine("fsdp", build(Branches), momentum, mesh, **options)
        for step in range(3 if options["sharding"] == "no_shard" else 1):
            step_on(engine, branches_of(rank, num_ranks, step, engine))
        return engine.full_state_dict()


def of_branches(num_ranks, steps):
    model = build(Branches)
    optimizer = momentum(list(model.parameters()))
    for step in range(steps):
        for rank in range(num_ranks):
            (branches_of(rank, num_ranks, step, model) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_replicated_units_may_be_other_ones_on_each_rank(pools):
    assert_states(pools(3).run(other_units, 3, None, {"sharding": "no_shard"}), of_branches(3, 3))


def test_ranks_that_gather_other_units_of_one_size_are_told(pools):
    for sharding in ("full_shard", "shard_grad_op"):
        with pytest.raises(RankError, match=r"parameters of blocks\.\d.* meets .*parameters of blocks\.\d") as caught:
            pools(3).run(other_units, 3, "shared_memory", {"sharding": sharding})
        assert str(caught.value).count("make one unit of the module that chooses: wrap='root'") == 1
