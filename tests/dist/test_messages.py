"""What engines hold and send, step by step: bytes by role, messages in their order, nothing that piles up.

Formulas are checked against what was sent and what is alive, and the order of events instead of their times.
"""

import gc
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from shardlab.comm import Pending
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Collective, Role
from tests.comm.test_communicator import Log
from tests.dist import cases, nasty
from tests.dist.every_engine import KINDS, adamw, assert_states, backward, engine_of, momentum, one_step, own_batch
from tests.dist.test_fsdp import build
from tests.dist.test_stories_of_modules import hooks_of
from tests.test_architecture import READING

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3")


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


def steps_by(rank, key, kind, goes_back, num_ranks):
    """What is sent in steps of two micro-batches, and the state after them."""
    log = Log()
    torch.manual_seed(rank)  # of dropout
    with engine_of(key, num_ranks, cases.seeded(kind).double(), optimizer_fn=momentum) as engine:
        with engine.mesh.observed_by(log):
            for step in range(2):
                with engine.no_sync():
                    goes_back(engine, cases.loss_of(*forward(engine, step, 0)))
                goes_back(engine, cases.loss_of(*forward(engine, step, 1)))
                engine.step()
                engine.zero_grad()
        return [(event.op, event.tag, event.num_bytes) for event in log.events], engine.full_state_dict()


def forward(engine, step, micro_batch):
    x, y = own_batch(engine, "MLP", step, micro_batch)
    return engine(x), y


@pytest.mark.parametrize("kind", [nasty.EveryPartReentrant, nasty.WholeReentrant])
def test_a_plain_backward_through_backwards_of_checkpoints_sends_once(pools, kind):
    """Each block that is computed again brings its gradients by a backward of its own; on the strategies by turns."""
    places = (*((key, 2) for key in (*STRATEGIES, "fsdp", "fsdp-shard_grad_op")), ("zero2", 3))
    for key, num_ranks in places[kind is nasty.WholeReentrant :: 2]:
        told = pools(num_ranks).run(steps_by, key, kind, lambda engine, loss: engine.backward(loss), num_ranks)
        plainly = pools(num_ranks).run(steps_by, key, kind, lambda engine, loss: loss.backward(), num_ranks)
        for (sent, state), (plainly_sent, plain_state) in zip(told, plainly, strict=True):
            assert plainly_sent == sent, key
            assert_states([plain_state], state, atol=0)


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
        units = [[shards.layout for shards in unit.shards] for unit in engine.strategy.units[:2]]
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
        "pending": sum(issubclass(type(thing), Pending) and thing._finish is not None for thing in things),
        "threads": threading.active_count(),
    }


def many_steps(rank, key):
    held = gc.get_objects()  # so that an earlier test's leftovers cannot go in the middle of this one
    counts = []
    with engine_of(key, 2, build(), optimizer_fn=adamw) as engine:
        for step in range(12):
            one_step(engine, step=step % 5)
            engine.clip_grad_norm_(1.0)
            engine.zero_grad()
            if step in (6, 11):
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


def calls_of_a_backward(rank, name):
    model, calls = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))), []
    with Mesh({"data": 2}) as mesh, build_engine(name, model, adamw, mesh, guards=False) as engine:
        for _ in range(2):  # the first also makes what later ones find
            loss = engine(torch.ones(4, 8)).square().mean()
            calls.clear()
            sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
            engine.backward(loss)
            sys.setprofile(None)
            engine.step()
            engine.zero_grad()
    return len(calls)


@pytest.mark.parametrize(("name", "most"), [("fsdp", 400), ("bucketed", 145)])
def test_a_bare_backward_makes_few_calls_of_python(pools, name, most):
    assert max(pools(2).run(calls_of_a_backward, name)) <= most


def way_of_a_gradient(rank, name):
    """Functions of the engines, file.function, in the order of their first calls from a backward to its step."""
    found = {}

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.name == "engines":
            found.setdefault(f"{path.stem}.{frame.f_code.co_name}")

    options = {"wrap": "0"} if name == "fsdp" else {}
    model = nn.Sequential(nn.Linear(8, 8))
    with Mesh({"data": 2}) as mesh, build_engine(name, model, adamw, mesh, **options) as engine:
        loss = engine(torch.ones(4, 8)).square().mean()
        sys.setprofile(note)
        engine.backward(loss)
        engine.step()
        sys.setprofile(None)
    return list(found)


@pytest.mark.parametrize("name", ["bucketed", "zero1", "fsdp"])
def test_a_gradient_goes_the_way_that_the_guide_says(pools, name):
    head, _, *rows = re.findall(r"^\|(.*)\|$", READING.read_text().split("One gradient")[1].split("\n## ")[0], re.M)
    column = [cell.strip(" `") for cell in head.split("|")].index(name)
    cells = [row.split("|") for row in rows]
    said = [function for row in cells for place in (1, column) for function in re.findall(r"`(\w+\.\w+)`", row[place])]
    assert len(said) > 10
    for called in pools(2).run(way_of_a_gradient, name):
        assert [function for function in called if function in said] == said
