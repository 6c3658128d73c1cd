"""What must hold whatever happens: a killed rank, ten thousand steps, and savings that are what the clock says."""

import gc
import os
import tracemalloc
from contextlib import closing
from time import perf_counter_ns

import pytest
import torch

from shardlab.comm import CollectiveEvent
from shardlab.records.store import RunWriter, load_run, write_manifest
from shardlab.trace.recorder import Recorder
from shardlab.vocabulary import Collective, Phase, Role, SpanKind
from tests.trace.training import CPU, NeverOffCpu


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
