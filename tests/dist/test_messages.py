"""What engines hold and send, step by step: bytes by role, messages in their order, nothing that piles up.

Formulas are checked against what was sent and what is alive, and the order of events instead of their times.
"""

import gc
import threading
import time

import pytest
import torch

from shardlab.comm import Pending
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import Collective, Role
from tests.comm.test_communicator import Log
from tests.dist import cases, nasty
from tests.dist.every_engine import ALL, KINDS, adamw, axes_of, backward, engine_of, one_step, own_batch
from tests.dist.test_fsdp import Blocks, build, half_frozen
from tests.dist.test_stories_of_modules import hooks_of

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3")


# Elements a rank sends in a step, in units of P(N - 1)/N; of 4P bytes the parts that are held: 1 whole, 0 divided by N.
FORMULAS = {
    "ddp": (2, (1, 1, 1)),
    "bucketed": (2, (1, 1, 1)),
    "zero1": (2, (1, 1, 0)),
    "zero2": (2, (1, 0, 0)),
    "zero3": (3, (0, 0, 0)),
    "fsdp": (3, (0, 0, 0)),
    "fsdp-dim0": (3, (0, 0, 0)),
    "fsdp-shard_grad_op": (2, (0, 0, 0)),
    "fsdp-no_shard": (2, (1, 1, 1)),
}


class Divisible(Blocks):
    """Every row count is a multiple of 12, so no layout needs padding at 2, 3 or 4 ranks."""

    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(7, 12)
        self.blocks = torch.nn.ModuleList(nasty.Block(12) for _ in range(3))
        self.leave = torch.nn.Linear(12, 12)


def wire_and_rest(rank, key, axes):
    log, (strategy, options) = Log(), ALL[key]
    options = {name: value for name, value in options.items() if name != "bucket_bytes"}
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


@pytest.mark.parametrize("key", FORMULAS)
def test_wire_elements_and_bytes_at_rest_are_the_formulas(pools, key):
    coefficient, whole = FORMULAS[key]
    numel = sum(param.numel() for param in build(Divisible).parameters())
    for num_ranks in (2, 3, 4):
        formula = tuple(
            size * numel // (1 if kept else num_ranks) for size, kept in zip((8, 8, 16), whole, strict=True)
        )
        for sent, held, padding in pools(num_ranks).run(wire_and_rest, key, axes_of(key, num_ranks)):
            assert padding == 0
            assert sent == {"data": pytest.approx(coefficient * numel * (num_ranks - 1) / num_ranks)}
            assert held == formula


def test_hybrid_sends_three_in_the_group_and_one_shard_over_replicas(pools):
    numel = sum(param.numel() for param in build(Divisible).parameters())
    for replicas, shards in ((2, 2), (4, 1), (1, 4)):
        axes = {"replica": replicas, "shard": shards}
        for sent, held, _ in pools(4).run(wire_and_rest, "fsdp-hybrid", axes):
            assert sent.get("shard", 0) == pytest.approx(3 * numel * (shards - 1) / shards)
            assert sent.get("replica", 0) == pytest.approx(2 * (numel / shards) * (replicas - 1) / replicas)
            assert held == tuple(size * numel // shards for size in (8, 8, 16))


def overlap_order(rank):
    """Issue order against the hooks: the first bucket must leave before the first layer's gradient is there."""
    log = Log()
    seen = []
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(log.events)))
        with build_engine("bucketed", model, adamw, mesh, bucket_bytes=256) as engine, mesh.observed_by(log):
            one_step(engine)
            return seen[0], len(log.events), len(engine.divisions())


def test_buckets_leave_during_backward(pools):
    for before_last_gradient, total, num_buckets in pools(2).run(overlap_order):
        assert total == num_buckets
        assert 0 < before_last_gradient < total


def gradients_of_half(rank):
    sent = {}
    for key in STRATEGIES:
        log = Log()
        with engine_of(key, 2, half_frozen(), optimizer_fn=adamw) as engine, engine.mesh.observed_by(log):
            one_step(engine)
        sent[key] = sum(event.numel for event in log.events if event.tag.startswith("gradient"))
    return sent


def test_gradients_of_frozen_parameters_are_not_sent(pools):
    trained = sum(param.numel() for param in half_frozen().parameters() if param.requires_grad)
    for sent in pools(2).run(gradients_of_half):
        assert all(trained <= numel <= trained + 8 for numel in sent.values()), (sent, trained)  # with padding


def accumulate(rank, strategy):
    log = Log()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, cases.build("MLP"), adamw, mesh) as engine:
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        with mesh.observed_by(log):
            with engine.no_sync():
                for _ in range(3):
                    engine.backward(cases.loss_of(engine(x), y))
            inside = [event.op for event in log.events]
            engine.backward(cases.loss_of(engine(x), y))
        return inside, [event.op for event in log.events[len(inside) :]]


def test_no_sync_sends_no_gradient(pools):
    for strategy in STRATEGIES:
        for inside, after in pools(2).run(accumulate, strategy):
            assert inside == ["all_gather"] * (6 if strategy == "zero3" else 0), "ZeRO-3 gathers for each pass"
            assert "reduce_scatter" in after or "all_reduce" in after


def lines_of_collectives(rank):
    log, lines = Log(), {}
    for strategy in (*STRATEGIES, "fsdp"):
        with Mesh({"data": 2}) as mesh, mesh.observed_by(log):
            with build_engine(strategy, cases.build("MLP"), adamw, mesh) as engine:
                x, y = own_batch(engine)
                engine.backward(cases.loss_of(engine(x), y))
                engine.step()
            lines[strategy] = {event.source_line for event in log.events}
            log.events.clear()
    return lines


def test_every_collective_names_a_line_of_the_caller(pools):
    for strategy, lines in pools(2).run(lines_of_collectives)[0].items():
        assert all(line.startswith(f"{__file__}:") for line in lines), (strategy, lines)


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
        """It comes from another thread, in the middle of whatever the engine does."""

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
                one_step(engine, step=step)
                sample()
                engine.zero_grad()
        for hook in hooks:
            hook.remove()
        units = [[shards.layout for shards in unit.shards] for unit in engine.units[:2]]
        padded = [8 * sum(layout.padded_numel for layout in layouts) for layouts in units]
        return max(watch.seen), watch.seen[-1], padded, 8 * sum(layout.numel for layouts in units for layout in layouts)


@pytest.mark.parametrize(("layout", "num_ranks"), [("flat", 2), ("dim0", 3)])
def test_never_more_gathered_than_root_and_unit_and_prefetched(pools, layout, num_ranks):
    for prefetch in (0, 1, 2):
        options = {"layout": layout, "prefetch": prefetch}
        results = pools(num_ranks).run(gathered_everywhere, num_ranks, options)
        for most, at_rest, (root, block), root_and_block in results:
            assert root_and_block <= most <= root + (1 + prefetch) * block
            assert at_rest == 0


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


def many_steps(rank, key):
    held = gc.get_objects()  # so that an earlier test's leftovers cannot go in the middle of this one
    counts = []
    with engine_of(key, 2, build(), optimizer_fn=adamw) as engine:
        for step in range(40):
            one_step(engine, step=step % 5)
            engine.clip_grad_norm_(1.0)
            engine.zero_grad()
            if step in (10, 39):
                counts.append(live(engine))
    del held
    return counts


@pytest.mark.parametrize("key", [*KINDS, "fsdp-offload"])
def test_tensors_hooks_and_pending_handles_stay_constant(pools, key):
    for early, late in pools(2).run(many_steps, key):
        assert early == late
        assert early["pending"] == 0
        assert early["hooks"] > 0


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
        backward(engine)
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
