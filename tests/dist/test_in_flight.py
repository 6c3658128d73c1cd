"""What is there while a step runs: gathered parameters, what travels, what is left after errors, steps and close()."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

from shardlab.comm import Pending
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Collective, Role
from shardlab.trace.observed import wire_bytes
from tests.comm.test_communicator import Log
from tests.dist import cases, nasty
from tests.dist.every_engine import assert_states
from tests.dist.test_engines import adamw, one_step
from tests.dist.test_fsdp import Blocks, build

SHARDED = {
    "zero3": ("zero3", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0"}),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op"}),
}
SETUPS = {
    **{name: (name, {}) for name in ("ddp", "bucketed", "zero1", "zero2")},
    **SHARDED,
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}),
}


def gathered(engine):
    return bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]


class GatheredAtIssue:
    """An observer: the gathered bytes whenever a collective is issued, with the buffer of a gather that begins."""

    def __init__(self, engine):
        self.engine, self.seen = engine, []

    def issued(self, event):
        begins = event.num_bytes if event.op is Collective.ALL_GATHER else 0
        self.seen.append(gathered(self.engine) + begins)

    def started(self, event):
        """Not here: it comes from another thread, in the middle of whatever the engine does."""

    completed = waited = started


def gathered_everywhere(rank, num_ranks, options):
    with Mesh({"data": num_ranks}) as mesh:
        model = build()
        engine = build_engine("fsdp", model, adamw, mesh, **options)
        watch = GatheredAtIssue(engine)

        def sample(*_):
            watch.seen.append(gathered(engine))

        for module in model.modules():
            module.register_forward_pre_hook(sample)
            module.register_forward_hook(sample)
        hooks = [param.register_post_accumulate_grad_hook(sample) for param in engine.params.values()]
        with mesh.observed_by(watch):
            for step in range(2):
                one_step(engine, rank, step=step)
                sample()
                engine.zero_grad()
        for hook in hooks:
            hook.remove()
        units = [[bucket.layout for bucket in unit.buckets] for unit in engine.units[:2]]
        padded = [8 * sum(layout.padded_numel for layout in layouts) for layouts in units]
        return max(watch.seen), watch.seen[-1], padded, 8 * sum(layout.numel for layouts in units for layout in layouts)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", ["flat", "dim0"])
def test_never_more_gathered_than_root_and_unit_and_prefetched(pools, layout, num_ranks):
    for prefetch in (0, 1, 2):
        options = {"layout": layout, "prefetch": prefetch}
        results = pools(num_ranks).run(gathered_everywhere, num_ranks, options)
        for most, at_rest, (root, block), root_and_block in results:
            assert root_and_block <= most <= root + (1 + prefetch) * block
            assert at_rest == 0


class Raises(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


def fail_and_go_on(rank, setup, num_ranks):
    strategy, options = SHARDED[setup]
    with Mesh({"data": num_ranks}) as mesh:
        model = build()
        engine = build_engine(strategy, model, adamw, mesh, **options)
        left = []
        with pytest.raises(RuntimeError, match="mat1"):
            engine(torch.ones(2, 3).double())
        left.append(gathered(engine))
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, num_ranks))
        hook = model.blocks[1].register_forward_hook(lambda _, __, output: Raises.apply(output))
        loss = cases.loss_of(engine(x), y)
        with pytest.raises(ArithmeticError, match="in backward"):
            engine.backward(loss)
        hook.remove()
        left.append(gathered(engine))
        engine.zero_grad()
        one_step(engine, rank)
        return left, engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("setup", SHARDED)
def test_after_an_exception_nothing_stays_gathered_and_training_goes_on(pools, setup, num_ranks):
    model = build()
    optimizer = adamw(list(model.parameters()))
    x, y = cases.rows("MLP", 0, 0, num_ranks)
    cases.loss_of(model(x), y).backward()
    optimizer.step()
    for left, state in pools(num_ranks).run(fail_and_go_on, setup, num_ranks):
        assert left == [0, 0]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def hooks_of(model, params):
    """Every hook on a module, and on a parameter or what stands in its place."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    tensors = {*params, *model.parameters()}
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return on_modules + sum(len(getattr(tensor, kind) or ()) for tensor in tensors for kind in kinds)


def alone_after_close(rank, setup, num_ranks):
    strategy, options = SETUPS[setup]
    model = build()
    with Mesh({"data": num_ranks}) as mesh:
        before = hooks_of(model, model.parameters())
        with build_engine(strategy, model, adamw, mesh, **options) as engine:
            one_step(engine, rank)
            engine.zero_grad()
        log = Log()
        with mesh.observed_by(log):
            optimizer = adamw(list(model.parameters()))
            for step in (1, 2):
                x, y = cases.rows("MLP", step, 0, num_ranks)
                cases.loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict(), len(log.events), hooks_of(model, model.parameters()) - before


@pytest.mark.parametrize("setup", SETUPS)
def test_after_close_the_module_trains_alone(pools, setup):
    """Every parameter is an ordinary one again: a plain optimizer steps it, and nothing is sent or hooked."""
    model = build()
    for steps in ((0,), (1, 2)):
        optimizer = adamw(list(model.parameters()))
        for step in steps:
            x, y = cases.rows("MLP", step, 0, 3)
            cases.loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for state, num_sent, num_hooks in pools(3).run(alone_after_close, setup, 3):
        assert (num_sent, num_hooks) == (0, 0)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def live(engine):
    """What piles up if a step leaves something behind."""
    time.sleep(0.1)  # the thread of the collectives lets its last job go a moment after the waiter has gone on
    gc.collect()
    things = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in things),
        "hooks": hooks_of(engine.module, engine.params.values()),
        "pending": sum(issubclass(type(thing), Pending) and not thing.waited for thing in things),
        "threads": threading.active_count(),
    }


def two_hundred_steps(rank, setup):
    strategy, options = SETUPS[setup]
    held = gc.get_objects()  # so that an earlier test's leftovers cannot go in the middle of this one
    counts = []
    with Mesh({"data": 2}) as mesh, build_engine(strategy, build(), adamw, mesh, **options) as engine:
        for step in range(200):
            one_step(engine, rank, step=step % 5)
            engine.clip_grad_norm_(1.0)
            engine.zero_grad()
            if step in (10, 199):
                counts.append(live(engine))
    del held
    return counts


@pytest.mark.parametrize("setup", SETUPS)
def test_tensors_hooks_and_pending_handles_stay_constant(pools, setup):
    for early, late in pools(2).run(two_hundred_steps, setup):
        assert early == late
        assert early["pending"] == 0
        assert early["hooks"] > 0


# Elements a rank sends in a step, in units of P(N - 1)/N; of 4P bytes the parts that are held: 1 whole, 0 divided by N.
FORMULAS = {
    "ddp": ("ddp", {}, 2, (1, 1, 1)),
    "bucketed": ("bucketed", {}, 2, (1, 1, 1)),
    "zero1": ("zero1", {}, 2, (1, 1, 0)),
    "zero2": ("zero2", {}, 2, (1, 0, 0)),
    "zero3": ("zero3", {}, 3, (0, 0, 0)),
    "fsdp": ("fsdp", {}, 3, (0, 0, 0)),
    "fsdp-dim0": ("fsdp", {"layout": "dim0"}, 3, (0, 0, 0)),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op"}, 2, (0, 0, 0)),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}, 2, (1, 1, 1)),
}


class Divisible(Blocks):
    """Every row count is a multiple of 12, so no layout needs padding at 2, 3 or 4 ranks."""

    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(7, 12)
        self.blocks = torch.nn.ModuleList(nasty.Block(12) for _ in range(3))
        self.leave = torch.nn.Linear(12, 12)


def wire_and_rest(rank, strategy, options, axes):
    log = Log()
    with Mesh(axes) as mesh:
        with build_engine(strategy, build(Divisible), adamw, mesh, **options) as engine:
            x = torch.ones(2, 7).double()
            with mesh.observed_by(log):
                engine.backward(engine(x).square().mean())
                engine.step()
            held = bytes_by_role(engine.live_tensors())
        sent = {}
        for event in log.events:
            sent[event.axis] = sent.get(event.axis, 0) + wire_bytes(event) / 8
        roles = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
        return sent, tuple(held[role] for role in roles), engine.padding_bytes


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("setup", FORMULAS)
def test_wire_elements_and_bytes_at_rest_are_the_formulas(pools, setup, num_ranks):
    strategy, options, coefficient, whole = FORMULAS[setup]
    numel = sum(param.numel() for param in build(Divisible).parameters())
    formula = tuple(size * numel // (1 if kept else num_ranks) for size, kept in zip((8, 8, 16), whole, strict=True))
    for sent, held, padding in pools(num_ranks).run(wire_and_rest, strategy, options, {"data": num_ranks}):
        assert padding == 0
        assert sent == {"data": pytest.approx(coefficient * numel * (num_ranks - 1) / num_ranks)}
        assert held == formula


def test_hybrid_sends_three_in_the_group_and_one_shard_over_replicas(pools):
    numel = sum(param.numel() for param in build(Divisible).parameters())
    for replicas, shards in ((2, 2), (4, 1), (1, 4)):
        axes = {"replica": replicas, "shard": shards}
        for sent, held, _ in pools(4).run(wire_and_rest, "fsdp", {"sharding": "hybrid_shard"}, axes):
            assert sent.get("shard", 0) == pytest.approx(3 * numel * (shards - 1) / shards)
            assert sent.get("replica", 0) == pytest.approx(2 * (numel / shards) * (replicas - 1) / replicas)
            assert held == tuple(size * numel // shards for size in (8, 8, 16))


class Calls:
    """An observer: what was issued and waited for, in order."""

    def __init__(self):
        self.calls = []

    def issued(self, event):
        self.calls.append(("issued", event.op, event.tag))

    def waited(self, event):
        self.calls.append(("waited", event.op, event.tag))

    def started(self, event):
        """It comes from another thread."""

    completed = started


def calls_of_a_hybrid(rank):
    calls = Calls()
    with (
        Mesh({"replica": 2, "shard": 2}) as mesh,
        build_engine("fsdp", build(), adamw, mesh, sharding="hybrid_shard", wrap="blocks.*") as engine,
        mesh.observed_by(calls),
    ):
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 4))
        engine.backward(cases.loss_of(engine(x), y))
    return calls.calls


def test_the_sum_over_replicas_travels_while_the_next_unit_computes(pools):
    for calls in pools(4).run(calls_of_a_hybrid):
        for block, following in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0"), ("blocks.0", "root")):
            summed = (Collective.ALL_REDUCE, f"gradients of {block}")
            scattered = ("issued", Collective.REDUCE_SCATTER, f"gradients of {following}")
            assert calls.index(("issued", *summed)) < calls.index(scattered) < calls.index(("waited", *summed))
        in_flight = most = 0
        for what, op, _ in calls:
            if op is Collective.REDUCE_SCATTER:
                in_flight += 1 if what == "issued" else -1
                most = max(most, in_flight)
        assert most == 1  # buffers of a unit at a time


def test_a_step_makes_no_stub_for_what_it_reshards(monkeypatch):
    """Each is a launch on a device; at a hundred blocks they were thousands a step."""
    made, full = [], torch.full
    with build_engine("fsdp", build(), adamw, wrap="blocks.*", precision="bf16") as engine:
        monkeypatch.setattr(torch, "full", lambda *args, **options: made.append(args) or full(*args, **options))
        engine.backward(engine(torch.ones(2, 7, dtype=torch.float64)).sum())
        assert made == []


class Scaled(nn.Module):
    """With a single element, as CLIP's ``logit_scale``: one that can be written to where others cannot."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(7, 5), nn.Parameter(torch.tensor(5.0))

    def forward(self, x):
        return self.linear(x) * self.scale


def assign(param):
    param.data = torch.ones(param.shape, dtype=param.dtype)


@pytest.mark.parametrize("write", [torch.zero_, lambda param: param.clamp_(max=4.5), assign])
@pytest.mark.parametrize("setup", [("zero3", {}), ("fsdp", {}), ("fsdp", {"sharding": "no_shard"})])
def test_what_is_written_into_a_resharded_parameter_is_refused_and_does_not_stay(setup, write):
    """Of a parameter that was kept from before the engine; the write would be lost without a word."""
    strategy, options = setup
    model = Scaled().double()
    kept, x = dict(model.named_parameters()), torch.ones(2, 7, dtype=torch.float64)
    with build_engine(strategy, model, adamw, **options) as engine:
        for _ in range(2):
            engine.backward(engine(x).sum())
            engine.step()
            before = engine.full_state_dict()
            # At once, or at the next verb.
            with pytest.raises(RuntimeError, match=r"parameter 'scale'.*full_params\(keep_changes=True\)"):
                with torch.no_grad():
                    write(kept["scale"])
                engine(x)
            engine.zero_grad()
            assert_states([engine.full_state_dict()], before)
