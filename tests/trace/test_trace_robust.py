"""What must hold whatever happens: a killed rank, ten thousand steps, and savings that are what the clock says."""

import gc
import os
import signal
import time
import tracemalloc
from contextlib import closing
from time import perf_counter_ns

import pytest
import torch
from torch import nn

from shardlab.analysis import attribution, overlap, what_if_free
from shardlab.comm import CollectiveEvent
from shardlab.comm.transports.gloo import GlooTransport
from shardlab.comm.transports.shared_memory import SharedMemoryTransport
from shardlab.launch import RankError
from shardlab.trace.recorder import Recorder
from shardlab.trace.store import RunWriter, load_run, write_manifest
from shardlab.vocabulary import Collective, HostTransport, Phase, Role, SpanKind
from tests.trace.training import CPU, NeverOffCpu, Setting, train

LAST_WHOLE = 4


class DiesInAStep:
    """Called at the end of each step on each rank; rank 1 is killed in the middle of step 5."""

    def __init__(self):
        self.step = -1

    def __call__(self, engine, train_step):
        self.step += 1
        if self.step == LAST_WHOLE + 1 and engine.mesh.data.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("strategy", ["bucketed", "zero1"])
def test_a_killed_run_keeps_every_step_before_the_kill(pools, tmp_path, strategy):
    write_manifest(tmp_path, {"run": strategy})
    setting = Setting(strategy, steps=1000, directory=tmp_path, at_rest=DiesInAStep())
    with pytest.raises(RankError):
        pools(2).run(train, setting)
    records = load_run(tmp_path)
    of_rank = {rank: rows["step"].tolist() for rank, rows in records.steps.groupby("rank")}
    assert of_rank[1] == list(range(LAST_WHOLE + 1))
    assert of_rank[0] in (of_rank[1], [*of_rank[1], LAST_WHOLE + 1])  # it may have been through with that step
    for table in (records.collectives, records.spans):
        assert set(table.loc[table["step"] >= 0, "step"]) == set(records.steps["step"])
    assert overlap(records.collectives, records.spans)["comm_us"].gt(0).any()


def fake_step(recorder, step):
    """A step with two collectives, three spans and gradients at rest, at no cost of its own."""
    with recorder.step(step):
        with recorder.phase(Phase.BACKWARD, SpanKind.BACKWARD):
            for number in range(2):
                event = CollectiveEvent(
                    seq=number, op=Collective.ALL_REDUCE, axis="data", tag=f"gradients of bucket {number}",
                    dtype="float32", numel=8, num_bytes=32, group_size=2, transport="gloo",
                    emulated=False, source_line="",
                )  # fmt: skip
                recorder.issued(event)
                recorder.begin_span(f"blocks.{number}", SpanKind.BACKWARD)
                recorder.end_span(f"blocks.{number}", SpanKind.BACKWARD)
                event.start_ns = event.end_ns = event.wait_start_ns = event.wait_end_ns = perf_counter_ns()
        recorder.at_rest()
    recorder.finish_step(1.0, 1.0, 1e-3, 4)


@pytest.fixture
def _as_in_a_rank():
    """The objects of all other tests are not gone through for tensors 10,000 times."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_as_in_a_rank")
def test_ten_thousand_steps_leave_the_recorder_as_small_as_one_thousand(tmp_path):
    write_manifest(tmp_path, {"run": "long"})
    gradient, held = torch.ones(8), {}
    with closing(RunWriter(tmp_path, 0, "long", "measured")) as writer:
        recorder = Recorder(writer, NeverOffCpu(), perf_counter_ns(), device=CPU)
        recorder.live_tensors = lambda: {Role.GRADIENT: [gradient]}
        try:
            for step in range(10_000):
                if step in (900, 9_900):  # tracing memory is slow: only around what is compared
                    tracemalloc.start()
                fake_step(recorder, step)
                if step in (999, 9_999):
                    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/shardlab/*")])
                    held[step] = sum(trace.size for trace in snapshot.traces)
                    tracemalloc.stop()
        finally:
            tracemalloc.stop()
        assert held[9_999] < held[999] + 5_000
        assert os.path.getsize(tmp_path / "rank0.journal") > 5e6  # noqa: PTH202
    records = load_run(tmp_path)
    assert records.steps["step"].tolist() == list(range(10_000))
    assert len(records.collectives) == 20_000
    assert 29_900 < len(records.spans) <= 30_000  # a span in which the clock did not move has no row


SLEEP_S = 0.5  # long against what a busy machine adds to a step


class SlowBackward(torch.autograd.Function):
    """Compute that takes longer than the collective sleeps."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(1.2 * SLEEP_S)
        return gradient


class SlowUnit(nn.Module):
    def forward(self, x):
        return SlowBackward.apply(x)


class TwoBuckets(nn.Sequential):
    """112 and 100 bytes of gradients, with slow compute between: a bucket of 112 bytes travels meanwhile."""

    def __init__(self):
        super().__init__(nn.Linear(6, 4), SlowUnit(), nn.Linear(4, 5))


def train_with_a_sleeper(rank, setting, sleep_s):
    """The first collective of gradients in each step sleeps, after the transport has begun it."""
    issued, start, slept, due = Recorder.issued, GlooTransport.start_all_reduce, set(), []
    reduce = SharedMemoryTransport.all_reduce

    def noted(self, event):
        issued(self, event)
        if self._phase is Phase.BACKWARD and self._step not in slept:
            slept.add(self._step)
            due.append(event)

    def sleepy(self, tensor, reduction):
        finish = start(self, tensor, reduction)
        if not due:
            return finish
        due.clear()
        return lambda: (time.sleep(sleep_s), finish())

    def sleepy_at_once(self, tensor, reduction, tag):
        if due:
            due.clear()
            time.sleep(sleep_s)
        reduce(self, tensor, reduction, tag)

    Recorder.issued, GlooTransport.start_all_reduce = noted, sleepy
    SharedMemoryTransport.all_reduce = sleepy_at_once
    try:
        return train(rank, setting)
    finally:
        Recorder.issued, GlooTransport.start_all_reduce = issued, start
        SharedMemoryTransport.all_reduce = reduce


def sleepy_run(pool, transport, directory, strategy, sleep_s):
    """Records, and the time of the shortest step: a busy machine only ever adds to one."""
    write_manifest(directory, {"run": strategy})
    options = {"bucket_bytes": 112}
    setting = Setting(strategy, 5, directory=directory, model=TwoBuckets, options=options, transport=transport)
    pool.run(train_with_a_sleeper, setting, sleep_s)
    records = load_run(directory)
    timed = records.steps[records.steps["step"] > 0]
    return records, timed.groupby("step")["step_us"].max().min()


def hidden_us(records):
    """Communication under compute in a step: what overlap says is saved."""
    table = overlap(records.collectives, records.spans)
    return table.loc[table["step"] > 0, "both_us"].median()


def gain_us(records, tag, step):
    return what_if_free(records.collectives, records.spans, step=step).set_index("tag").loc[tag, "gain_us"]


@pytest.mark.parametrize("transport", HostTransport)
def test_the_saving_that_is_reported_is_the_saving_on_the_clock(pools, tmp_path, transport):
    """A sleeping collective hidden behind compute, exposed after it, and gone."""
    pool = pools(2)
    hidden, hidden_step_us = sleepy_run(pool, transport, tmp_path / "hidden", "bucketed", SLEEP_S)
    exposed, exposed_step_us = sleepy_run(pool, transport, tmp_path / "exposed", "ddp", SLEEP_S)
    _, gone_step_us = sleepy_run(pool, transport, tmp_path / "gone", "ddp", 0.0)
    saved_us = exposed_step_us - hidden_step_us
    assert saved_us == pytest.approx(1e6 * SLEEP_S, rel=0.25)  # the experiment is what it should be
    assert hidden_us(hidden) - hidden_us(exposed) == pytest.approx(saved_us, rel=0.1)
    names = attribution(hidden.collectives, hidden.spans).dropna(subset="unit")
    assert "1" in set(names.loc[names["hidden_us"] > 0.5e6 * SLEEP_S, "unit"])
    slowest = exposed.collectives.loc[exposed.collectives["step"] == 2]
    slowest = slowest.loc[(slowest["end_us"] - slowest["start_us"]).idxmax(), "tag"]
    gains = [gain_us(exposed, slowest, step) for step in (1, 2, 3)]
    assert sorted(gains)[1] == pytest.approx(exposed_step_us - gone_step_us, rel=0.1)
    assert gain_us(hidden, "gradients of bucket 0", 2) < 0.1e6 * SLEEP_S  # what is hidden gains nothing
