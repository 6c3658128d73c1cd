"""The cause of a step's time, and what the change that it names gains: by replay, and by making the change."""

from dataclasses import replace

import pandas as pd
import pytest

from shardlab.partition.step_program import Issue, Wait
from shardlab.why.causes import BALANCED, UNKNOWN, causes
from shardlab.why.changed_messages import ahead
from shardlab.why.judged_steps import Recorded
from shardlab.why.recorded_step import recorded_steps
from tests.analysis.hand_made import NAN
from tests.analysis.made_steps import Loop

FSDP = Loop("fsdp")
LATENCY, LATE_GATHER = "latency of many small messages", "late gather (prefetch too short)"
MATRIX = {  # what is wrong, the cause to name, the change made
    "slow loader": (Loop(data=9000), "input wait", {"data": 0}),
    "recomputation": (Loop(recompute=1000), "recomputation", {"recompute": 0}),
    "slow optimizer": (Loop(optimizer=9000), "optimizer step", {"optimizer": 0}),
    "slow rank": (Loop(late=1500), "straggler", {"late": 0}),
    "slow rank, fsdp": (replace(FSDP, late=1500), "straggler", {"late": 0}),
    "contention": (Loop(us_per_byte=0.0205, slow_beside=2.0, sizes=(100_000,) * 8, buckets=8), "contention", None),
    "low bandwidth": (Loop(us_per_byte=0.2), "bandwidth", {"us_per_byte": 0.1}),
    "high latency, one bucket": (Loop(latency=9000, buckets=1), LATENCY, {"latency": 4500}),
    "small buckets": (Loop(sizes=(25_000,) * 24, forward=30, backward=60, buckets=24, latency=300), LATENCY, None),
    "low bandwidth, fsdp": (replace(FSDP, us_per_byte=0.2), "bandwidth", {"us_per_byte": 0.1}),
    "small units": (replace(FSDP, latency=5000), LATENCY, None),
    "no prefetch": (replace(FSDP, prefetch=0, us_per_byte=0.02), LATE_GATHER, {"prefetch": 1}),
    "uneven units": (
        replace(FSDP, sizes=(100_000, 100_000, 600_000, 100_000), us_per_byte=0.02), "uneven units",
        {"sizes": (100_000,) * 9},
    ),
    "gathers in front": (
        Loop("zero3", us_per_byte=0.018), "exposed first gather", {"engine": "fsdp"},
    ),
    "one bucket": (
        Loop(sizes=(100_000,) * 8, buckets=1, us_per_byte=0.018), "exposed last bucket", {"buckets": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in MATRIX), ("slow rank", 3), ("no prefetch", 3)])
def test_the_cause_is_named_and_its_gain_is_that_of_the_change(name, ranks):
    loop, cause, change = MATRIX[name]
    loop = replace(loop, ranks=ranks)
    first = causes(*loop.tables())[0]
    assert first.name == cause, first
    assert 0 < first.gain_us <= first.us == pytest.approx(first.share * loop.step_us)
    if change:
        # From zero3 to fsdp all messages change places.
        rel = 0.02 if "engine" not in change else 0.15
        assert first.gain_us == pytest.approx(loop.step_us - replace(loop, **change).step_us, rel=rel)


def test_of_a_slow_message_over_an_emulated_link_its_bandwidth_explains_what_the_link_takes_alone():
    moved, *others = Loop(us_per_byte=0.2).tables()
    link = {name: moved.assign(transport=f"shared_memory as {name}") for name in ("0.04Gbps,10us", "80Gbps,10us")}
    slow, fast = (causes(one, *others) for one in link.values())
    assert slow[0].name == "bandwidth"
    assert slow[0].share > 0.8
    assert "bandwidth" not in {cause.name for cause in fast}, "its bytes take 10 us of 20 ms; the rest is the host's"


def test_a_gather_that_is_moved_beside_compute_starts_as_late_as_others_there():
    step, *_ = recorded_steps(*replace(FSDP, prefetch=0).tables())
    late = step.with_messages(
        lambda one: one if one.op == "all_gather" else replace(one, dispatch_us=dict.fromkeys(one.dispatch_us, 500.0))
    )
    moved = [one.dispatch_us for one in ahead(late).messages if one.op == "all_gather"]
    assert moved
    assert all(us >= 500.0 for by_rank in moved for us in by_rank.values())


def test_a_changed_step_that_cannot_end_gains_nothing():
    """In one of the steps each rank waits for a message before it issues the one for which the other rank waits."""
    record = Recorded(*Loop().tables(), None)
    one, other = record.steps[0].messages[:2]
    stuck = record.steps[0].each(
        lambda rank, _: (do(sent) for sent in ((one, other) if rank else (other, one)) for do in (Issue, wait))
    )
    faster = [step.with_work(lambda *_: 0.0) for step in record.steps[1:]]
    assert record.gains([stuck, *faster]).tolist() == [0.0, *record.gains([*faster, faster[0]])[1:]]


def wait(message):
    return Wait(message, 0.0)


def test_healthy_loops_are_balanced_and_one_rank_has_causes_too():
    for loop in (Loop(), FSDP, Loop(ranks=1), Loop("fsdp", ranks=3)):
        first = causes(*loop.tables())[0]
        assert (first.name, first.gain_us) == (BALANCED, 0)
    assert causes(*Loop(ranks=1, data=9000).tables())[0].name == "input wait"


def test_what_is_missing_is_said():
    moved, worked, steps = Loop(late=1500).tables()
    # Ranks that go on before what they wait for has ended: streams wait, and the record does not say so.
    unseen = Loop(us_per_byte=0.1).tables()
    unseen[0]["wait_end_us"] = unseen[0]["wait_start_us"]
    for tables, words in (
        ((moved, worked, steps.assign(start_us=NAN)), "when steps began"),
        ((moved, worked[:0], steps), "spans"),
        ((moved, worked, steps[steps["step"] < 2]), "3 steps are needed beside the first"),
        (unseen, "a replay that reproduces"),
    ):
        (only,) = causes(*tables)
        assert only.name == UNKNOWN
        assert words in only.evidence


def test_a_rank_that_is_last_now_and_then_is_no_straggler():
    moved, worked, steps = Loop(late=300).tables()
    assert causes(moved, worked, steps)[0].name == BALANCED


@pytest.mark.parametrize("loop", [Loop(late=1500), FSDP, replace(FSDP, ranks=3, prefetch=0, us_per_byte=0.03)])
def test_a_step_that_is_run_again_as_it_was_takes_its_time(loop):
    moved, worked, steps = loop.tables()
    again = recorded_steps(moved, worked, steps)
    assert [one.us for one in again] == pytest.approx(steps.groupby("step")["step_us"].median().tolist())
    first = again[0]
    assert first.with_transfers(lambda _, us: us).us == pytest.approx(first.us)
    assert first.with_transfers(lambda _, us: us / 2).us <= first.us


def test_what_was_sent_before_a_step_is_no_part_of_it():
    moved, worked, steps = Loop(late=300).tables()
    begins = steps.set_index(["rank", "step"])["start_us"]
    first = moved.drop_duplicates(["rank", "step"]).assign(seq=1000, phase="data", tag="a batch")
    for column, before in (("issue_us", 900), ("start_us", 900), ("end_us", 50), ("wait_start_us", 900)):
        first[column] = begins.loc[list(zip(first["rank"], first["step"], strict=True))].to_numpy() - before
    both = pd.concat([moved, first.assign(wait_end_us=first["end_us"])], ignore_index=True)
    again = recorded_steps(both, worked, steps)
    assert [one.us for one in again] == pytest.approx(steps.groupby("step")["step_us"].median().tolist())
    assert "a batch" not in {one.tag for step in again for one in step.messages}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_queue_that_moves_several_messages_at_once_is_replayed_too(ranks):
    """As a group of torch's own does, whose gloo has two threads; they end in another order than they began."""
    moved, worked, steps = Loop(ranks=ranks, us_per_byte=0.1).tables()
    # Not in the same lane on all ranks.
    moved["start_us"] = moved["start_us"].where((moved["seq"] + moved["rank"]) % 3 > 0, moved["issue_us"])
    again = recorded_steps(moved, worked, steps)
    assert [one.us for one in again] == pytest.approx(steps.groupby("step")["step_us"].median().tolist())
    assert again[0].with_transfers(lambda _, us: us / 2).us < again[0].us


@pytest.mark.parametrize(
    ("loop", "cause", "gain_us"),
    [
        (Loop(late=1500), "straggler", 6000), (Loop(us_per_byte=0.05), "bandwidth", 7040),
        (Loop(data=9000), "input wait", 9000), (Loop(optimizer=5000), "optimizer step", 5000),
        (Loop(recompute=1500), "recomputation", 6000), (Loop(), BALANCED, 0),
        (Loop(sizes=(25_000,) * 64, forward=30, backward=60, buckets=64, latency=300),
         "latency of many small messages", 36_220),
    ],
)  # fmt: skip
def test_where_a_stream_waits_causes_are_shares_of_the_step(loop, cause, gain_us):
    moved, worked, steps = loop.tables()
    first = causes(moved.assign(transport="nccl"), worked, steps)[0]
    assert first.name == cause
    assert first.gain_us == pytest.approx(gain_us, rel=0.03)
    assert cause == BALANCED or first.change.endswith(", at most,")


def test_what_no_stream_was_seen_to_wait_for_is_missing():
    moved, worked, steps = FSDP.tables()
    (only,) = causes(moved.assign(transport="nccl"), worked, steps)
    assert only.name == UNKNOWN
    assert "not seen to wait" in only.evidence


def test_gradients_that_are_sent_each_for_itself_want_buckets():
    moved, worked, steps = Loop(sizes=(25_000,) * 64, forward=30, backward=60, buckets=64, latency=300).tables()
    alone = moved.assign(tag=moved["tag"].str.replace("bucket", "parameter"))
    first = causes(alone, worked, steps)[0]
    assert (first.name, first.change) == ("latency of many small messages", "buckets (--strategies bucketed)")


@pytest.mark.parametrize(
    ("loop", "cause", "change"),
    [
        # Gradients are there in the last backward alone, whatever was computed before.
        (replace(MATRIX["one bucket"][0], us_per_byte=0.03, micro_batches=3), "exposed last bucket", {"buckets": 8}),
        (replace(FSDP, prefetch=0, us_per_byte=0.02, micro_batches=2), LATE_GATHER, {"prefetch": 1}),
    ],
)
def test_with_several_micro_batches_the_gain_is_that_of_the_change(loop, cause, change):
    first = causes(*loop.tables())[0]
    assert first.name == cause, first
    assert first.gain_us == pytest.approx(loop.step_us - replace(loop, **change).step_us, rel=0.02)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 2)])
def test_reductions_of_every_micro_batch_are_a_cause_and_those_of_the_last_are_the_change(ranks, micro_batches):
    loop = Loop(ranks=ranks, sizes=(100_000,) * 4, us_per_byte=0.1, micro_batches=micro_batches, reduces_in_each=True)
    first = causes(*loop.tables())[0]
    assert first.name == "every micro-batch communicates", first
    more = (micro_batches - 1) * 0.4 * 2 * (ranks - 1) / ranks  # as a ring sends them
    assert first.evidence == (
        f"each of 4 reductions of gradients is sent {micro_batches} times a step, {more:.3g} MB of it before the last"
    )
    without = replace(loop, reduces_in_each=False)
    assert first.gain_us == pytest.approx(loop.step_us - without.step_us, rel=0.02)
    assert "every micro-batch communicates" not in [cause.name for cause in causes(*without.tables())]
    moved, worked, steps = loop.tables()
    on_streams = causes(moved.assign(transport="nccl"), worked, steps)
    assert "every micro-batch communicates" in [cause.name for cause in on_streams]
    # A strategy that tags all alike sends several in one backward; nobody knows what they carry.
    alike = moved.assign(tag="gradients").where(moved["phase"] == "backward", moved)
    assert "every micro-batch communicates" not in [cause.name for cause in causes(alike, worked, steps)]


@pytest.mark.parametrize(
    ("ranks", "queued_us", "words", "change"),
    [
        (2, NAN, "it sleeps, or others have its core", "no sleep, or a core for each rank and thread"),
        (2, 450, "for 95 % of that it sleeps", "nothing that sleeps in a step"),
        (2, 8100, "for 90 % of that it could run, and others have its core", "a core for each rank and thread"),
        (1, 8100, "for 90 % of that it could run, and others have its core", "a core for each thread"),
    ],
)
def test_a_rank_that_sleeps_is_told_from_one_that_has_no_core(ranks, queued_us, words, change):
    moved, worked, steps = Loop(ranks=ranks, data=9000).tables()
    is_away = worked["kind"] == "data"
    starts = worked["start_us"] + is_away.astype(float)  # apart from the optimizer of the step before
    worked = worked.assign(kind=worked["kind"].mask(is_away, "off_cpu"), start_us=starts)
    first = causes(moved, worked, steps.assign(queued_us=queued_us))[0]
    assert first.name == "off the CPU"
    assert first.evidence == f"in 9 ms of a step a rank is off the CPU: {words}"
    assert first.change.startswith(change)
    assert first.gain_us == pytest.approx(8999)


def test_calling_small_operations_is_no_compute():
    loop = Loop(steps=5)  # one of them is traced
    moved, worked, steps = loop.tables()
    assert causes(moved, worked, steps.assign(dispatch_us=NAN))[0].name == BALANCED
    called = steps.assign(dispatch_us=NAN, traced_memory=steps["step"] == 2)
    called.loc[called["step"] == 2, "dispatch_us"] = 6000.0
    first = causes(moved, worked, called)[0]
    assert (first.name, first.evidence) == ("host-bound", "5.64 ms of a step are Python between the operations")
    assert first.gain_us == pytest.approx(5640, rel=0.01)  # of the 6 ms some hid a message


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_ranks_lose_in_turn_is_no_less_than_the_gain(ranks):
    """Each waits for the others' time, too: a share of the ranks' own time would be less than what the change gains."""
    first = causes(*Loop(ranks=ranks, data=9000, in_turn=True).tables())[0]
    assert (first.name, first.evidence) == ("input wait", "loading data takes 9 ms of a step")
    assert first.gain_us == pytest.approx(9000)


def test_small_messages_of_a_script_beside_large_ones_are_told_by_size_and_may_be_one():
    loop = Loop(activations=4, latency=1500, sizes=(500_000,) * 8, buckets=2, us_per_byte=0.002)
    moved, worked, steps = loop.tables()
    number = moved.groupby(["rank", "step"]).cumcount().astype(str)
    moved["tag"] = moved["tag"].mask(moved["bytes"] == 4, "all_reduce of the script " + number)
    first = causes(moved.assign(axis="data"), worked, steps)[0]
    assert first.name == LATENCY
    assert "wait for 8 messages of 4 B and 2 of 2 MB, each with 3 ms of latency" in first.evidence
    assert first.change == "one message for the script's 8, if none is needed before the last,"
    assert first.gain_us == pytest.approx(7 * 2 * 1500, rel=0.01)


def test_messages_between_operations_of_a_divided_model_are_not_joined():
    """Each sum of activations needs the one before it, so no bucket holds two of them."""
    loop = Loop(activations=1000, latency=3000, sizes=(10_000,) * 4)
    moved, worked, steps = loop.tables()
    first = causes(moved.assign(axis="tensor"), worked, steps)[0]
    assert (first.name, first.change) == (LATENCY, "a link of half the latency")
    assert first.gain_us == pytest.approx(loop.step_us - replace(loop, latency=1500).step_us, rel=0.02)


def test_where_nobody_waits_steps_that_were_not_watched_do_not_count():
    loop = Loop(us_per_byte=0.05, steps=12)
    moved, worked, steps = loop.tables()
    moved, worked = (table[table["step"] % 4 == 1] for table in (moved.assign(transport="nccl"), worked))
    first = causes(moved, worked, steps)[0]
    assert (first.name, first.gain_us) == ("bandwidth", pytest.approx(7040, rel=0.03))


@pytest.mark.parametrize("known", [0, 4])
def test_a_trace_without_sizes_of_groups_has_causes_too(known):
    moved, worked, steps = Loop(data=9000).tables()
    moved["group_size"] = moved["group_size"].where(moved["seq"] < known)
    assert causes(moved.assign(transport="nccl"), worked, steps)[0].name == "input wait"
