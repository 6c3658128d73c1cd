"""A replayed step against cases that can be worked out by hand, and its messages against those of the engines."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.dry.messages import DryRun
from shardlab.engines import DDP, FSDP, HFSDP, Bucketed, Engine, ZeRO1, ZeRO2, ZeRO3, zero_in_groups
from shardlab.forecast.replay import REPLAYED, Schedule, Unit, replay
from shardlab.models.gpt import GPT, GPTConfig
from shardlab.planner import Setup, described
from shardlab.planner.groups import groups_of
from shardlab.planner.rows import ROWS, Row
from shardlab.units import units_of
from shardlab.vocabulary import FLAG, Collective, MeshAxis, Phase

UNITS = [Unit(f"layer {number}", 1.0, 2.0, 10.0, 20.0) for number in range(3)]
ROOT = Unit("root", 0.5, 1.0, 4.0, 8.0)
ALONE = 3 * (1 + 2) + 0.5 + 1


def free(op, axis, num_bytes):
    return 0.0


def at(seconds_per_byte):
    return lambda op, axis, num_bytes: seconds_per_byte * num_bytes


def transfers(found, op=None):
    """Of each message in the order of issue: what is sent, and in seconds when it starts and ends."""
    sent = [one for one in found.host.transfers.values() if op in (None, one.of.op)]
    return [(one.of, one.started_us / 1e6, one.ended_us / 1e6) for one in sorted(sent, key=lambda one: one.issued_us)]


@pytest.mark.parametrize("strategy", REPLAYED)
def test_without_a_link_a_step_takes_its_compute(strategy):
    schedule = Schedule(ROWS[strategy], micro_batches=2, optimizer_seconds=0.25, contention=0.5)
    found = replay(UNITS, schedule, free, ROOT)
    assert found.seconds == pytest.approx(2 * ALONE + 0.25)
    assert found.exposed_seconds == pytest.approx(0)
    assert found.slowed_seconds == pytest.approx(0)


@pytest.mark.parametrize(
    ("strategy", "num_bytes"),
    [
        ("ddp", 68), ("bucketed", 68), ("zero1", 68 + 34), ("zero2", 68 + 34), ("zero3", 34 + 34 + 68),
        ("fsdp", 34 + 34 + 68), ("shard_grad_op", 34 + 68), ("single", 0),
    ],
)  # fmt: skip
def test_with_infinite_compute_a_step_takes_its_messages(strategy, num_bytes):
    units = [replace(unit, forward_seconds=0, backward_seconds=0) for unit in (*UNITS, ROOT)]
    found = replay(units[:-1], Schedule(ROWS[strategy]), at(0.1), units[-1])
    sends = 0 if strategy == "single" else num_bytes
    assert found.seconds == pytest.approx(0.1 * sends) == found.exposed_seconds


def test_a_gather_is_hidden_by_the_unit_before_and_the_first_and_the_last_message_are_not():
    found = replay(UNITS, Schedule(ROWS["fsdp"], contention=0), at(0.01), ROOT)
    # Every message is shorter than the compute beside it. Nothing computes beside the first gathers, of the root and
    # the first unit, the root's gather in backward, and the last reductions, of the first unit and the root.
    assert found.exposed_seconds == pytest.approx(0.01 * (4 + 10 + 4 + 20 + 8))
    (_, before_starts, before_ends), (_, after_starts, _), *_ = found.computed
    hidden = [start for one, start, _ in transfers(found) if (one.tag, one.phase) == ("layer 1", Phase.FORWARD)]
    assert hidden == [before_starts]
    assert after_starts == before_ends


def test_a_unit_ends_no_earlier_than_the_host_has_launched_it():
    """The host is behind in two units, ahead by what they cost more in the others, and begins each step anew."""
    slow = [replace(UNITS[0], forward_host_seconds=5.0), *UNITS[1:], replace(ROOT, backward_host_seconds=0.5)]
    found = replay(slow[:3], Schedule(ROWS["single"]), free, slow[3])
    assert found.host_seconds == pytest.approx(5.0 - 1.0)
    assert found.seconds == pytest.approx(ALONE + 4.0)
    behind = replace(UNITS[0], forward_host_seconds=2.0, backward_host_seconds=2.0)
    assert replay([behind], Schedule(ROWS["single"], micro_batches=2), free).host_seconds == pytest.approx(1 + 1)
    # What is waited for at once is counted once: here the reductions take as long as the host.
    late = replay([behind], Schedule(ROWS["fsdp"], contention=0), at(0.3))
    assert late.seconds == pytest.approx(3.0 + late.host_seconds + late.exposed_seconds)


def test_without_prefetch_every_gather_is_exposed():
    found = replay(UNITS, Schedule(ROWS["fsdp"], prefetch=0, contention=0), at(0.01), ROOT)
    # A gather waits on its queue for the reduction of the unit before, which is exposed with it.
    assert found.exposed_seconds == pytest.approx(0.01 * (2 * 34 + 2 * 20 + 20 + 8))


def test_a_bucket_is_hidden_and_the_last_one_exposed():
    found = replay(UNITS, Schedule(ROWS["bucketed"], bucket_bytes=1, contention=0), at(0.01), ROOT)
    assert found.exposed_seconds == pytest.approx(0.01 * 20)
    one = replay(UNITS, Schedule(ROWS["bucketed"], bucket_bytes=1000, contention=0), at(0.01), ROOT)
    assert one.exposed_seconds == pytest.approx(0.01 * 68)


def test_zero1_gathers_after_the_optimizer():
    found = replay(UNITS, Schedule(ROWS["zero1"], optimizer_seconds=1.0), at(0.01), ROOT)
    *_, (_, _, stepped) = found.computed
    gathers = transfers(found, Collective.ALL_GATHER)
    assert gathers
    assert all(start >= stepped for _, start, _ in gathers)
    assert found.seconds == pytest.approx(stepped + 0.34)


def test_compute_beside_a_message_is_slower():
    unit = Unit("only", 1.0, 2.0, 0.0, 0.0)
    other = Unit("other", 4.0, 0.0, 1.0, 0.0)
    found = replay([unit, other], Schedule(ROWS["fsdp"], contention=0.5), at(0.6))
    # The gather of the other lasts 0.6 s, in which only 0.4 s of work are done.
    (_, _, alone), (_, *both), *_ = found.computed
    assert (alone, *both) == pytest.approx((1.2, 1.2, 5.2))


def test_only_what_is_sent_in_several_messages_pays_for_them():
    def latency(op, axis, num_bytes):
        return 1.0

    units = [replace(unit, num_messages=4) for unit in UNITS]
    zero3 = replay(units, Schedule(ROWS["zero3"]), latency)
    fsdp = replay(units, Schedule(ROWS["fsdp"], prefetch=0), latency)
    sent = [sum(end - start for _, start, end in transfers(found)) for found in (zero3, fsdp)]
    assert sent == pytest.approx([3 * 3 * 4, 3 * 3])


def test_replicas_add_the_shards_on_a_queue_of_their_own():
    found = replay(UNITS, Schedule(ROWS["hybrid_shard"], {MeshAxis.SHARD: 2}), at(0.01), ROOT)
    sums, scattered = (transfers(found, op) for op in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER))
    assert {one.queue[0] for one, *_ in sums} == {MeshAxis.REPLICA}
    assert [one.num_bytes for one, *_ in sums] == [10, 10, 10, 4]
    assert all(start >= end for (_, start, _), (_, _, end) in zip(sums, scattered, strict=True))


def test_only_the_last_micro_batch_reduces_unless_each_does():
    counts = []
    for each in (False, True):
        found = replay(UNITS, Schedule(ROWS["fsdp"], micro_batches=3, reduces_each=each), free, ROOT)
        counts.append(len(transfers(found, Collective.REDUCE_SCATTER)))
    assert counts == [4, 12]


HOSTS = {MeshAxis.REPLICA: 2, MeshAxis.SHARD: 2}
SMALL = {"bucket_bytes": 1024}
GPT_SIZES = GPTConfig(vocab_size=16, seq_len=4, num_layers=3, num_heads=2, hidden=8)  # 4 ranks divide all buckets
STRATEGIES = {
    "ddp": DDP, "bucketed": lambda: Bucketed(**SMALL), "zero1": lambda: ZeRO1(**SMALL), "zero2": lambda: ZeRO2(**SMALL),
    "zero3": lambda: ZeRO3(**SMALL), "fsdp": FSDP, "shard_grad_op": lambda: FSDP(sharding="shard_grad_op"),
    "hybrid_shard": lambda: FSDP(sharding="hybrid_shard"),
}  # fmt: skip
PAIRS = product(range(4), repeat=2)
OVER_TWO_AXES = {Row(inner, outer): partial(zero_in_groups, outer, inner, **SMALL) for outer, inner in PAIRS}
OVER_TWO_AXES[Row(3, outer=2, by_unit=True)] = HFSDP


def sent_by_engine(make, axes, micro_batches):
    """The messages of a step of a small GPT on rank 0, in the order of issue."""

    def step(mesh, log):
        with Engine(GPT(GPT_SIZES), lambda params: torch.optim.SGD(params, lr=0.1), mesh, make()) as engine, log.step():
            for left in reversed(range(micro_batches)):
                with engine.no_sync() if left else nullcontext():
                    with log.phase(Phase.FORWARD):
                        loss = engine(torch.zeros(2, 4, dtype=torch.long)).sum()
                    with log.phase(Phase.BACKWARD):
                        engine.backward(loss)
            with log.phase(Phase.STEP):
                engine.step()

    return [one for one in DryRun(step, axes).of_rank(0)[0] if one.event.tag != FLAG]


def sent_in_replay(row, axes, micro_batches, prefetch=1):
    """Those of a step of it whose units have the parameters of the engine's units, buckets or parameters."""
    model, name = GPT(GPT_SIZES), "fsdp" if row.by_unit else "bucketed" if row.packs else "ddp"
    setup = Setup(name, 4, **SMALL, units=units_of(model, "auto") if row.by_unit else {})
    sizes = {group.name: 4.0 * group.layout.padded_numel for group in groups_of(described(model), setup)}
    units = [Unit(name, 1.0, 1.0, num_bytes, num_bytes) for name, num_bytes in sizes.items()]
    root = units.pop(0) if row.by_unit else None
    schedule = Schedule(row, axes, prefetch, micro_batches, bucket_bytes=1)
    if row.packs and not row.by_unit:  # buckets are filled from the end
        units.reverse()
    return [one for one, *_ in transfers(replay(units, schedule, at(1), root))]


def assert_as_the_engine(row, make, axes, micro_batches, prefetch=1):
    events = sent_by_engine(make, axes, micro_batches)
    replayed = sent_in_replay(row, axes, micro_batches, prefetch)
    for axis in axes:  # a communicator for each: their messages do not wait for each other, unless they are of one unit
        ours = [(one.op, one.phase, one.num_bytes, one.tag) for one in replayed if one.queue[0] == axis]
        engines = [(one.op, phase, one.num_bytes, one.tag) for one, phase in events if one.axis == axis]
        assert [one[:3] for one in ours] == [one[:3] for one in engines], (row, axis)
        assert all(mine[3] in theirs[3] for mine, theirs in zip(ours, engines, strict=True)), (row, axis)
    return events


@pytest.mark.parametrize("strategy", [name for name in REPLAYED if name != "single"])
def test_the_messages_are_those_of_the_engine(strategy):
    row = ROWS[strategy]
    assert_as_the_engine(row, STRATEGIES[strategy], row.sizes(4, 2), micro_batches=2)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_gathers_are_ahead_as_in_the_engine(prefetch):
    assert_as_the_engine(ROWS["fsdp"], lambda: FSDP(prefetch=prefetch), {MeshAxis.DATA: 4}, 1, prefetch)


@pytest.mark.parametrize(("row", "make"), OVER_TWO_AXES.items())
def test_a_row_over_two_axes_sends_what_its_engine_does(row, make):
    sent = dict.fromkeys(HOSTS, 0.0)
    for one in assert_as_the_engine(row, make, HOSTS, micro_batches=1):
        sent[one.event.axis] += one.wire_bytes(0)
    num_params = sum(param.numel() for param in GPT(GPT_SIZES).parameters())
    assert sent == {axis: num_params * each for axis, each in row.sent(HOSTS, 4, 4).items()}


seconds = st.floats(0, 3)
units = st.builds(Unit, st.just("unit"), seconds, seconds, seconds, seconds)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(units, min_size=1, max_size=5), st.sampled_from(REPLAYED), st.integers(0, 2), st.floats(0, 1), seconds,
    st.floats(1, 5),
)  # fmt: skip
def test_a_slower_link_is_never_faster_and_everything_runs_in_turn(some, strategy, prefetch, contention, pace, slower):
    some = [replace(unit, name=f"unit {number}") for number, unit in enumerate(some)]
    schedule = Schedule(ROWS[strategy], prefetch=prefetch, micro_batches=2, bucket_bytes=2, contention=contention)
    found = replay(some, schedule, at(pace))
    assert replay(some, schedule, at(pace * slower)).seconds >= found.seconds * (1 - 1e-9)
    for queue in found.host.queues:
        own = [times for one, *times in transfers(found) if one.queue == queue]
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    waited = found.exposed_seconds + found.slowed_seconds + sum(work.us for work, *_ in found.computed) / 1e6
    assert waited == pytest.approx(found.seconds)


def test_ranks_that_send_to_single_others_are_each_planned():
    def step(mesh, log):
        with log.step():
            if mesh["data"].rank:
                mesh["data"].send(torch.ones(8), 0, tag="to 0").wait()
            else:
                for rank in (1, 2):
                    mesh["data"].recv(torch.empty(8), rank, tag="to 0").wait()

    sent = DryRun(step, {"data": 3}).messages().groupby("rank")["wire_bytes"].agg(["size", "sum"])
    assert sent.to_numpy().tolist() == [[2, 0], [1, 32], [1, 32]]
