"""What the recorder writes against what happened: collectives, phases, spans, waits, and its own footprint."""

import math
import threading
import time
from collections import Counter
from contextlib import closing
from time import perf_counter_ns
from unittest import mock

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.analysis import overlap, step_split
from shardlab.analysis.rows import in_timed_steps
from shardlab.comm import CollectiveEvent
from shardlab.comm.transports.shared_memory import SharedBuffers
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.records.store import RunWriter, load_run, write_manifest
from shardlab.trace.clock import HostClock, clock_for
from shardlab.trace.recorder import MOST_HELD, Recorder
from shardlab.vocabulary import FLAG, Collective, HostTransport, Phase, Role, SpanKind
from tests.trace.training import CPU, MLP, Setting, train


def record(pool, setting, directory, fn=train):
    """Train on the ranks; what they returned, and the records."""
    write_manifest(directory, {"run": setting.strategy, "ranks": pool.world_size})
    setting.directory = directory
    return pool.run(fn, setting), load_run(directory)


def train_counted(rank, setting):
    """Train with a counter in the shared buffers: (collective, elements, dtype) of each meeting, in order."""
    meetings, meet = [], SharedBuffers.synchronize

    def met(self, call):
        meetings.append((call.collective, call.numel, call.dtype))
        meet(self, call)

    with mock.patch.object(SharedBuffers, "synchronize", met):
        return train(rank, setting), meetings


@pytest.mark.parametrize(("strategy", "num_ranks"), [("bucketed", 2), ("zero1", 3)])
def test_recorded_collectives_are_those_that_the_shared_buffers_saw(pools, tmp_path, strategy, num_ranks):
    setting = Setting(strategy, transport=HostTransport.SHARED_MEMORY)
    results, records = record(pools(num_ranks), setting, tmp_path, train_counted)
    for rank, (_, calls) in enumerate(results):
        rows = records.collectives[records.collectives["rank"] == rank]
        expected = []
        for row in rows.itertuples():
            meetings = 2 if row.op == Collective.ALL_REDUCE else 1  # all of them are smaller than half a buffer
            expected += [(row.op, row.numel, row.dtype)] * meetings
        assert calls == expected
        assert set(rows["transport"]) == {"shared_memory"}
        assert len(rows) > 3 * 2


def test_each_row_adds_up(pools, tmp_path):
    _, records = record(pools(2), Setting("zero1"), tmp_path)
    rows = records.collectives
    assert (rows["bytes"] == rows["numel"] * rows["dtype"].map({"float32": 4, "float64": 8})).all()
    for row in rows[rows["op"] == Collective.ALL_REDUCE].itertuples():
        assert row.wire_bytes == ring_wire_bytes(Collective.ALL_REDUCE, row.bytes, 2)
    assert (rows["issue_us"] <= rows["start_us"]).all()
    assert (rows["start_us"] <= rows["end_us"]).all()
    waited = rows["wait_end_us"].notna()
    assert waited.all()
    assert (rows["end_us"] <= rows["wait_end_us"]).all()
    in_step = rows[(rows["step"] >= 0) & (rows["phase"] != Phase.METRICS)]
    sent = in_step.groupby(["rank", "step"])["wire_bytes"].sum()
    steps = records.steps.set_index(["rank", "step"])["wire_bytes"]
    pd.testing.assert_series_equal(sent.sort_index(), steps.sort_index(), check_dtype=False)


def test_phases_say_where_a_collective_was_issued(pools, tmp_path):
    _, records = record(pools(2), Setting("zero1"), tmp_path)
    rows = records.collectives[records.collectives["step"] == 1]
    phases = Counter(zip(rows["op"], rows["phase"], strict=True))
    num_buckets = rows[rows["rank"] == 0]["tag"].str.startswith("gradients").sum()
    assert num_buckets > 1
    assert phases[Collective.REDUCE_SCATTER, Phase.BACKWARD] == 2 * num_buckets
    assert phases[Collective.ALL_GATHER, Phase.STEP] == 2 * num_buckets
    assert phases[Collective.ALL_REDUCE, Phase.CLIP] == 2
    assert phases[Collective.ALL_REDUCE, Phase.METRICS] == 2
    assert sum(phases.values()) == len(rows) == 4 * num_buckets + 8


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1"])
def test_recording_changes_no_bit(pools, tmp_path, strategy):
    pool = pools(1 if strategy == "single" else 2)
    recorded, _ = record(pool, Setting(strategy, traced=1), tmp_path)
    plain = pool.run(train, Setting(strategy))
    for one, other in zip(recorded, plain, strict=True):
        assert one.losses == other.losses
        assert len(set(one.losses)) == 3
        assert all(torch.equal(a, b) for a, b in zip(one.params, other.params, strict=True))


def test_units_and_phases_are_spans(pools, tmp_path):
    _, records = record(pools(1), Setting("single"), tmp_path)
    assert records.collectives.empty
    assert records.steps["overlap"].isna().all()
    assert records.steps["wire_bytes"].tolist() == [0.0] * 3
    spans = records.spans[records.spans["step"] == 2].set_index(["unit", "kind"])[["start_us", "end_us"]]
    units = ("first", "blocks.0", "blocks.1", "last")
    forward = [spans.loc[(unit, "forward")] for unit in units]
    backward = [spans.loc[(unit, "backward")] for unit in units[:0:-1]]  # the first's input has no gradient
    for row, following in zip([*forward, *backward], [*forward, *backward][1:], strict=False):
        assert row["start_us"] <= row["end_us"] <= following["start_us"]
    whole_forward, whole_backward = spans.loc[("model", "forward")], spans.loc[("model", "backward")]
    assert whole_forward["start_us"] <= forward[0]["start_us"]
    assert forward[-1]["end_us"] <= whole_forward["end_us"] <= whole_backward["start_us"]
    assert backward[-1]["end_us"] <= whole_backward["end_us"]
    assert len(spans.loc[[("model", "optimizer")]]) == 2  # clip and step


class Recomputed(MLP):
    """Its blocks keep no activations: backward computes them again."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=False))
        return self.last(x) * self.scale


def test_recomputation_in_backward_is_told_from_forward(pools, tmp_path):
    plain, _ = record(pools(1), Setting("single"), tmp_path / "plain")
    outcome, records = record(pools(1), Setting("single", model=Recomputed), tmp_path / "again")
    assert outcome[0].losses == plain[0].losses
    spans = records.spans[records.spans["step"] == 2]
    again = spans[spans["kind"] == "recompute"]
    assert again["unit"].tolist() == ["blocks.1", "blocks.0"]
    assert (spans["kind"] == "forward").sum() == 5  # four units and the model
    whole = spans[(spans["unit"] == "model") & (spans["kind"] == "backward")]
    assert again["start_us"].min() >= whole["start_us"].min()
    assert again["end_us"].max() <= whole["end_us"].max()


GATE = threading.Event()  # in a rank: a bucket has arrived


class SlowBackward(torch.autograd.Function):
    """Compute that takes until the bucket under way has arrived: order, not timing."""

    @staticmethod
    def forward(ctx, x):
        GATE.clear()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert GATE.wait(30)
        time.sleep(0.005)
        return gradient


class SlowUnit(nn.Module):
    def forward(self, x):
        return SlowBackward.apply(x)


class HidesTheLast(nn.Sequential):
    """Gradients of the last layer come first and travel while ``1`` computes; those of the first come at the end."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), SlowUnit(), nn.Linear(4, 5))  # 112 and 100 bytes: two buckets


def train_gated(rank, setting):
    plain = Recorder.completed

    def completed(self, event):
        plain(self, event)
        if event.tag.startswith("gradients"):
            GATE.set()

    with mock.patch.object(Recorder, "completed", completed):
        return train(rank, setting)


def test_what_compute_covers_is_hidden_and_the_rest_is_exposed(pools, tmp_path):
    setting = Setting("bucketed", 2, model=HidesTheLast, link="10Gbps,20ms", options={"bucket_bytes": 112})
    _, records = record(pools(2), setting, tmp_path, train_gated)
    for rank in (0, 1):
        rows = records.collectives[(records.collectives["rank"] == rank) & (records.collectives["step"] == 1)]
        early, late = (rows[rows["tag"] == f"gradients of bucket {bucket}"].iloc[0] for bucket in (0, 1))
        spans = records.spans[(records.spans["rank"] == rank) & (records.spans["step"] == 1)]
        slow = spans[(spans["unit"] == "1") & (spans["kind"] == "backward")].iloc[0]
        assert early["end_us"] < slow["end_us"] <= late["issue_us"]
        assert early["wait_end_us"] - early["wait_start_us"] < early["end_us"] - early["start_us"]
        assert late["wait_start_us"] < late["end_us"] <= late["wait_end_us"]
        step = records.steps[(records.steps["rank"] == rank) & (records.steps["step"] == 1)].iloc[0]
        hidden, alone = (row["end_us"] - row["start_us"] for row in (early, late))
        assert min(hidden, alone) >= 40e3  # each message: twice the latency of the emulated link
        alone += (rows["end_us"] - rows["start_us"])[rows["tag"] == FLAG].sum()  # nothing covers these either
        assert step["overlap"] >= hidden / (hidden + alone) - 0.01
        waited = late["end_us"] - max(late["wait_start_us"], late["start_us"])
        assert waited <= step["exposed_comm_us"] * 1.01 <= alone * 1.02


def test_spans_leave_out_the_waits(pools, tmp_path):
    _, records = record(pools(2), Setting("ddp", 2, link="10Gbps,2ms"), tmp_path)
    for _, rows in records.collectives[records.collectives["step"] == 1].groupby("rank"):
        spans = records.spans[(records.spans["rank"] == rows["rank"].iloc[0]) & (records.spans["step"] == 1)]
        waits = list(zip(rows["wait_start_us"], rows["wait_end_us"], strict=True))
        assert sum(end - start for start, end in waits) > 8 * 2e3
        for start, end in zip(spans["start_us"], spans["end_us"], strict=True):
            assert all(end <= wait_start or wait_end <= start for wait_start, wait_end in waits)
        backward = spans[(spans["unit"] == "model") & (spans["kind"] == "backward")]
        assert len(backward) >= 2  # cut by the waits at its end
        assert len(spans[(spans["unit"] == "model") & (spans["kind"] == "forward")]) == 1


def test_the_steps_table_says_what_analysis_says(pools, tmp_path):
    _, records = record(pools(2), Setting("bucketed", link="1Gbps,1ms"), tmp_path)
    traffic = records.collectives[(records.collectives["phase"] != Phase.METRICS) & (records.collectives["step"] >= 0)]
    whole = records.spans[records.spans["unit"] == "model"]
    expected = overlap(traffic, whole).set_index(["rank", "step"]).sort_index()
    steps = records.steps.set_index(["rank", "step"]).sort_index()
    assert steps["overlap"].tolist() == pytest.approx(expected["overlap"].tolist())
    assert steps["exposed_comm_us"].tolist() == pytest.approx(expected["exposed_us"].tolist())
    assert steps["step_us"].min() > 0


class Told(HostClock):
    """Says the time that it was told, and no CPU time."""

    now_us = 0

    def mark(self):
        return 1000 * self.now_us

    def cpu_time(self):
        return None


def sent(recorder, op=Collective.ALL_REDUCE, **times_us):
    event = CollectiveEvent(0, op, "data", "", "float32", 8, 32, 1, "gloo", False, "")
    recorder.issued(event)
    told(event, **times_us)
    return event


def told(event, **times_us):
    for name, time_us in times_us.items():
        setattr(event, f"{name}_ns", 1000.0 * time_us)


def test_a_collective_counts_in_the_steps_in_whose_time_it_travels(tmp_path):
    write_manifest(tmp_path, {"run": "run"})
    clock = Told()
    with closing(RunWriter(tmp_path, 0, "run", "measured")) as writer:
        recorder = Recorder(writer, clock, 0, device=CPU)

        def step(number, begin, end, inside=lambda: None):
            """Computes from its begin to 10 us before its end."""
            clock.now_us = begin
            with recorder.step(number):
                inside()
                with recorder.phase(Phase.BACKWARD, SpanKind.BACKWARD):
                    clock.now_us = end - 10
                clock.now_us = end
                recorder.at_rest()
            recorder.finish_step(0.0, 0.0, 0.0, 1)

        events = []
        step(0, 0, 100, lambda: events.append(sent(recorder, start=80)))
        # It ends in the next step, which waits for it; that one also sends what travels on while the recorder works.
        step(1, 100, 200, lambda: (
            told(events[0], end=150, wait_start=140, wait_end=150),
            events.append(sent(recorder, start=195, end=230)),
        ))  # fmt: skip
        step(2, 300, 400, lambda: events.append(sent(recorder, start=240, end=290)))  # before it began
        step(3, 400, 500, lambda: events.append(sent(recorder)))  # never begins, as far as is known
        assert load_run(tmp_path).steps["step"].tolist() == [0, 1, 2]
    records = load_run(tmp_path)
    rows = records.collectives
    assert rows["step"].tolist() == rows["seq"].tolist() == [0, 1, 2, 3]
    assert rows["end_us"].tolist()[:3] == [150, 230, 290]
    assert rows[["start_us", "end_us"]].notna().all(axis=None)
    steps = records.steps
    assert steps["start_us"].tolist() == [0, 100, 300, 400]
    assert steps["exposed_comm_us"].tolist()[:2] == [10, 10 + 5]  # until 100; the wait until 150, and from 195
    assert steps["overlap"].tolist()[:2] == [0.5, pytest.approx(40 / 55)]
    assert steps["exposed_comm_us"].isna().tolist() == [False, False, True, True]
    split = step_split(rows, records.spans, steps).drop(columns=["run", "source"])
    assert split["moving_us"].tolist() == [10, 15, 0, 0]
    assert split["compute_us"].tolist() == [90, 80, 90, 90]
    assert split["other_us"].tolist() == [0, 5, 10, 10]
    counted, _ = in_timed_steps(rows, records.spans, steps)
    assert counted["seq"].tolist() == [1, 3]  # not the first step's, nor what was sent before its step
    # Tables alone: what compute of the next step covers is hidden too.
    assert overlap(rows, records.spans)["both_us"].tolist()[:2] == [10 + 40, 0]


def test_a_collective_that_never_ends_does_not_keep_steps_from_the_disk_for_ever(tmp_path):
    write_manifest(tmp_path, {"run": "run"})
    with closing(RunWriter(tmp_path, 0, "run", "measured")) as writer:
        recorder = Recorder(writer, HostClock(), 0, device=CPU)
        for step in range(MOST_HELD + 5):
            with recorder.step(step):
                if step == 2:
                    sent(recorder, Collective.RECV)
                recorder.at_rest()
            recorder.finish_step(0.0, 0.0, 0.0, 1)
        assert load_run(tmp_path).steps["step"].tolist() == list(range(MOST_HELD + 5))


def test_the_recorder_states_its_cost(tmp_path):
    write_manifest(tmp_path, {"run": "bucketed"})
    recorder = Recorder(RunWriter(tmp_path, 0, "x", "measured"), clock_for(CPU), perf_counter_ns(), device=CPU)
    for step in range(12, 14):
        assert math.isnan(recorder.cost_share)  # the first step allocates and does not count
        with recorder.step(step):
            recorder.at_rest()
        recorder.finish_step(1.0, 1.0, 1.0, 1)
    assert recorder.cost_share > 1  # a step of nothing: all of it is recording
    assert math.isnan(recorder.unwatched_cost_share)
    with recorder.step(14, watched=False):
        recorder.at_rest()
    recorder.finish_step(1.0, 1.0, 1.0, 1)
    assert recorder.unwatched_cost_share > 0
    recorder._writer.close()


def test_memory_at_rest_is_read_in_the_first_steps_and_then_at_every_sixteenth(tmp_path):
    write_manifest(tmp_path, {"run": "x"})
    with closing(RunWriter(tmp_path, 0, "x", "measured")) as writer:
        recorder = Recorder(writer, clock_for(CPU), perf_counter_ns(), device=CPU)
        for step in range(34):
            with recorder.step(step):
                recorder.at_rest()
            recorder.finish_step(1.0, 1.0, 1.0, 1)
    rows = load_run(tmp_path).memory
    read = rows[rows["where"] == "rest"].groupby("step").size()
    assert read.to_dict() == dict.fromkeys((0, 1, 16, 32), len(Role))
