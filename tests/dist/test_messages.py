"""What engines hold and send, step by step: bytes by role, messages in their order, nothing that piles up.

Formulas are checked against what was sent and what is alive, and the order of events instead of their times.
"""

import gc
import subprocess
import sys
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


def bytes_and_wire(rank, strategy, num_ranks):
    log = Log()
    with Mesh({"data": num_ranks}) as mesh:
        model = cases.build("MLP").to(torch.float32)
        with build_engine(strategy, model, adamw, mesh) as engine, mesh.observed_by(log):
            x, y = (cases.own_rows(part, rank).to(torch.float32) for part in cases.rows("MLP", 0, 0, num_ranks))
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
            held = bytes_by_role(engine.live_tensors())
            return held, engine.padding_bytes, [(e.op, wire_bytes(e), e.tag) for e in log.events]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bytes_at_rest_and_on_the_wire_are_the_formulas(pools, num_ranks):
    numel = sum(param.numel() for param in cases.build("MLP").parameters())
    for strategy in ("ddp", "bucketed", "zero1", "zero2"):
        results = pools(num_ranks).run(bytes_and_wire, strategy, num_ranks)
        for held, padding, events in results:
            gradients = (4 * numel + padding) // (num_ranks if strategy == "zero2" else 1)
            assert held[Role.PARAMETER] == 4 * numel + padding
            assert held[Role.GRADIENT] == gradients
            assert padding == (-numel % num_ranks) * 4 * strategy.startswith("zero")
            wire = sum(wire for _, wire, _ in events)
            assert wire == pytest.approx(2 * (4 * numel + padding) * (num_ranks - 1) / num_ranks, abs=1e-9)
        states = [held[Role.OPTIMIZER_STATE] for held, _, _ in results]
        if strategy.startswith("zero"):
            assert sum(states) == 8 * numel
            assert max(states) == 8 * -(-numel // num_ranks)
        else:
            assert states == [8 * numel] * num_ranks


def test_collectives_in_order(pools):
    expected = {
        "ddp": [("all_reduce", f"gradient of {n}.{kind}") for n in (0, 2, 4) for kind in ("weight", "bias")],
        "bucketed": [("all_reduce", "gradients of bucket 0")],
        "zero1": [("reduce_scatter", "gradients of bucket 0"), ("all_gather", "parameters of bucket 0")],
        "zero2": [("reduce_scatter", "gradients of bucket 0"), ("all_gather", "parameters of bucket 0")],
    }
    for strategy, collectives in expected.items():
        for _, _, events in pools(2).run(bytes_and_wire, strategy, 2):
            assert [(op, tag) for op, _, tag in events] == collectives


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


def views(rank):
    with Mesh({"data": 2}) as mesh, build_engine("bucketed", cases.build("MLP"), adamw, mesh) as engine:
        addresses = []
        for step in range(3):
            one_step(engine, step=step)
            buffer = engine.strategy.buckets[0].buffer
            assert all(
                param.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                for param in engine.params.values()
            )
            addresses.append(buffer.data_ptr())
            engine.zero_grad()
        return len(set(addresses))


def test_gradients_are_views_of_one_lasting_bucket(pools):
    assert pools(2).run(views) == [1, 1]


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


def bytes_over_a_step(rank, num_ranks, options):
    log = Log()
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine("zero3", cases.build("MLP").float(), adamw, mesh, **options) as engine,
    ):
        seen = {"built": bytes_by_role(engine.live_tensors())}
        x, y = (cases.own_rows(part, rank).float() for part in cases.rows("MLP", 0, 0, num_ranks))
        with mesh.observed_by(log):
            loss = cases.loss_of(engine(x), y)
            seen["after forward"] = bytes_by_role(engine.live_tensors())
            engine.backward(loss)
            engine.step()
        seen["at rest"] = bytes_by_role(engine.live_tensors())
        return seen, engine.padding_bytes, [(e.op, e.tag, e.numel) for e in log.events], len(engine.divisions())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_everything_is_sharded_at_rest(pools, num_ranks):
    numel = sum(param.numel() for param in cases.build("MLP").parameters())
    for options in ({}, {"bucket_bytes": 600}):
        results = pools(num_ranks).run(bytes_over_a_step, num_ranks, options)
        for seen, padding, events, num_units in results:
            chunk = (4 * numel + padding) // num_ranks
            assert seen["built"][Role.PARAMETER] == seen["at rest"][Role.PARAMETER] == chunk
            assert seen["at rest"][Role.GRADIENT] == chunk
            assert all(held[Role.GATHERED_PARAMETER] == 0 for held in seen.values())
            gathers = [("all_gather", f"parameters of bucket {index}") for index in range(num_units)]
            reduces = [("reduce_scatter", f"gradients of bucket {index}") for index in range(num_units)]
            assert [event[:2] for event in events] == [*gathers, *gathers, *reduces]
            assert sum(event[2] for event in events) == 3 * (numel + padding // 4)
        assert sum(seen["at rest"][Role.OPTIMIZER_STATE] for seen, *_ in results) == 8 * numel


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


@pytest.mark.parametrize(("layout", "num_ranks"), [("flat", 2), ("dim0", 3), ("flat", 4)])
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


def a_hundred_steps(rank, key):
    held = gc.get_objects()  # so that an earlier test's leftovers cannot go in the middle of this one
    counts = []
    with engine_of(key, 2, build(), optimizer_fn=adamw) as engine:
        for step in range(100):
            one_step(engine, step=step % 5)
            engine.clip_grad_norm_(1.0)
            engine.zero_grad()
            if step in (10, 99):
                counts.append(live(engine))
    del held
    return counts


@pytest.mark.parametrize("key", [*KINDS, "ddp", "zero2", "fsdp-shard_grad_op", "fsdp-offload"])
def test_tensors_hooks_and_pending_handles_stay_constant(pools, key):
    for early, late in pools(2).run(a_hundred_steps, key):
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


def test_a_step_makes_no_stub_for_what_it_reshards(monkeypatch):
    """Each is a launch on a device; at a hundred blocks they were thousands a step."""
    made, full = [], torch.full
    with build_engine("fsdp", build(), adamw, wrap="blocks.*", precision="bf16") as engine:
        monkeypatch.setattr(torch, "full", lambda *args, **options: made.append(args) or full(*args, **options))
        engine.backward(engine(torch.ones(2, 7, dtype=torch.float64)).sum())
        assert made == []


MAP = (
    "from tests.dist import cases\nfrom shardlab.engines.bucket import bucket_layouts\n"
    "from shardlab.vocabulary import Partition\n"
    "params = dict(cases.build('SmallGPT').named_parameters())\n"
    "print([one.names for one in bucket_layouts(params, 3, 2000, Partition.ELEMENTS)])"
)


def test_the_bucket_map_does_not_depend_on_the_hash_seed():
    maps = {
        subprocess.run(
            [sys.executable, "-c", MAP],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(maps) == 1
    assert "blocks.0.attention.q_proj.weight" in maps.pop()
