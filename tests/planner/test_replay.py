"""A replayed step against cases that can be worked out by hand, and its order against that of the planned messages."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.partition import ParamSpec
from shardlab.planner import PlannedModel, Setup
from shardlab.planner.replay import REPLAYED, Schedule, Unit, replay
from shardlab.vocabulary import FLAG, Collective, MeshAxis, Phase
from tests.oracle.collectives import calls_of_step

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
    schedule = Schedule(strategy, micro_batches=2, optimizer_seconds=0.25, contention=0.5)
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
    found = replay(units[:-1], Schedule(strategy), at(0.1), units[-1])
    sends = 0 if strategy == "single" else num_bytes
    assert found.seconds == pytest.approx(0.1 * sends) == found.exposed_seconds


def test_a_gather_is_hidden_by_the_unit_before_and_the_first_and_the_last_message_are_not():
    found = replay(UNITS, Schedule("fsdp", contention=0), at(0.01), ROOT)
    # Every message is shorter than the compute beside it. Nothing computes beside the first gathers, of the root and
    # the first unit, the root's gather in backward, and the last reductions, of the first unit and the root.
    assert found.exposed_seconds == pytest.approx(0.01 * (4 + 10 + 4 + 20 + 8))
    (_, before_starts, before_ends), (_, after_starts, _), *_ = found.computed
    hidden = [start for one, start, _ in transfers(found) if (one.tag, one.phase) == ("layer 1", Phase.FORWARD)]
    assert hidden == [before_starts]
    assert after_starts == before_ends


def test_without_prefetch_every_gather_is_exposed():
    found = replay(UNITS, Schedule("fsdp", prefetch=0, contention=0), at(0.01), ROOT)
    # A gather waits on its queue for the reduction of the unit before, which is exposed with it.
    assert found.exposed_seconds == pytest.approx(0.01 * (2 * 34 + 2 * 20 + 20 + 8))


def test_a_bucket_is_hidden_and_the_last_one_exposed():
    found = replay(UNITS, Schedule("bucketed", bucket_bytes=1, contention=0), at(0.01), ROOT)
    assert found.exposed_seconds == pytest.approx(0.01 * 20)
    one = replay(UNITS, Schedule("bucketed", bucket_bytes=1000, contention=0), at(0.01), ROOT)
    assert one.exposed_seconds == pytest.approx(0.01 * 68)


def test_zero1_gathers_after_the_optimizer():
    found = replay(UNITS, Schedule("zero1", optimizer_seconds=1.0), at(0.01), ROOT)
    *_, (_, _, stepped) = found.computed
    gathers = transfers(found, Collective.ALL_GATHER)
    assert gathers
    assert all(start >= stepped for _, start, _ in gathers)
    assert found.seconds == pytest.approx(stepped + 0.34)


def test_compute_beside_a_message_is_slower():
    unit = Unit("only", 1.0, 2.0, 0.0, 0.0)
    other = Unit("other", 4.0, 0.0, 1.0, 0.0)
    found = replay([unit, other], Schedule("fsdp", contention=0.5), at(0.6))
    # The gather of the other lasts 0.6 s, in which only 0.4 s of work are done.
    (_, _, alone), (_, *both), *_ = found.computed
    assert (alone, *both) == pytest.approx((1.2, 1.2, 5.2))


def test_only_what_is_sent_in_several_messages_pays_for_them():
    def latency(op, axis, num_bytes):
        return 1.0

    units = [replace(unit, num_messages=4) for unit in UNITS]
    zero3 = replay(units, Schedule("zero3"), latency)
    fsdp = replay(units, Schedule("fsdp", prefetch=0), latency)
    sent = [sum(end - start for _, start, end in transfers(found)) for found in (zero3, fsdp)]
    assert sent == pytest.approx([3 * 3 * 4, 3 * 3])


def test_replicas_add_the_shards_on_a_queue_of_their_own():
    found = replay(UNITS, Schedule("hybrid_shard", shard_group_size=2), at(0.01), ROOT)
    sums, scattered = (transfers(found, op) for op in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER))
    assert {one.queue[0] for one, *_ in sums} == {MeshAxis.REPLICA}
    assert [one.num_bytes for one, *_ in sums] == [10, 10, 10, 4]
    assert all(start >= end for (_, start, _), (_, _, end) in zip(sums, scattered, strict=True))


def test_only_the_last_micro_batch_reduces_unless_each_does():
    counts = []
    for each in (False, True):
        found = replay(UNITS, Schedule("fsdp", micro_batches=3, reduces_each=each), free, ROOT)
        counts.append(len(transfers(found, Collective.REDUCE_SCATTER)))
    assert counts == [4, 12]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["fsdp", "shard_grad_op", "hybrid_shard", "zero3", "zero1", "ddp", "bucketed"])
def test_the_order_of_messages_is_that_of_the_plan(strategy, prefetch):
    specs = [ParamSpec(f"blocks.{number}.weight", (8, 8), 4) for number in range(4)]
    by_unit = {f"blocks.{number}": [f"blocks.{number}.weight"] for number in range(4)}
    options = {"prefetch": prefetch, "bucket_bytes": 256, "micro_batches": 2}
    units = [Unit(name, 1.0, 1.0, 256, 256) for name in by_unit]
    root = None
    if strategy in ("fsdp", "shard_grad_op", "hybrid_shard"):
        specs.append(ParamSpec("head", (8, 8), 4))
        root = Unit("root", 1.0, 1.0, 256, 256)
        sharding = "full_shard" if strategy == "fsdp" else strategy
        options |= {"units": by_unit, "sharding": sharding}
        options |= {"shard_group_size": 2} if strategy == "hybrid_shard" else {}
    setup = Setup("fsdp" if root else strategy, 4, **options)
    planned = [call for call in calls_of_step(PlannedModel.of_specs(specs), setup) if call.tag != FLAG]
    schedule = Schedule(strategy, prefetch=prefetch, bucket_bytes=256, micro_batches=2, shard_group_size=2)
    replayed = [one for one, *_ in transfers(replay(units, schedule, at(1), root))]
    for axis in MeshAxis:
        messages = [(call.op, call.phase, call.numel * 4) for call in planned if call.axis == axis]
        assert messages == [(one.op, one.phase, one.num_bytes) for one in replayed if one.queue[0] == axis]
    if root:
        names = [call.tag.split(" of ")[1] for call in planned if call.axis != MeshAxis.REPLICA]
        assert names == [one.tag for one in replayed if one.queue[0] != MeshAxis.REPLICA]


seconds = st.floats(0, 3)
units = st.builds(Unit, st.just("unit"), seconds, seconds, seconds, seconds)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(units, min_size=1, max_size=5), st.sampled_from(REPLAYED), st.integers(0, 2), st.floats(0, 1), seconds,
    st.floats(1, 5),
)  # fmt: skip
def test_a_slower_link_is_never_faster_and_everything_runs_in_turn(some, strategy, prefetch, contention, pace, slower):
    some = [replace(unit, name=f"unit {number}") for number, unit in enumerate(some)]
    schedule = Schedule(strategy, prefetch=prefetch, micro_batches=2, bucket_bytes=2, contention=contention)
    found = replay(some, schedule, at(pace))
    assert replay(some, schedule, at(pace * slower)).seconds >= found.seconds * (1 - 1e-9)
    for queue in found.host.queues:
        own = [times for one, *times in transfers(found) if one.queue == queue]
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    waited = found.exposed_seconds + found.slowed_seconds + sum(work.us for work, *_ in found.computed) / 1e6
    assert waited == pytest.approx(found.seconds)
