"""Streams whose work takes a known time: what is hidden, what is exposed, when it was, and what hangs."""

from functools import partial
from math import inf

import pytest
import torch

from shardlab.comm import events
from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Pending
from shardlab.comm.queues import StreamQueue
from shardlab.comm.streams import mark
from shardlab.launch.board import Board, BoardWriter, CallState
from shardlab.trace import clock
from shardlab.trace.clock import StreamClock
from shardlab.trace.recorder import Recorder
from shardlab.trace.store import RunWriter, load_run, write_manifest
from shardlab.vocabulary import Collective, Phase, SpanKind
from tests.comm.device_streams import Device

MS = 1_000_000
CPU = torch.device("cpu")


class TakesTime:
    """A transport whose calls only enqueue, as NCCL's do."""

    name, emulated = "nccl", False

    def __init__(self, device, duration):
        self._device, self._duration = device, duration

    def all_reduce(self, tensor, reduction, tag=""):
        self._device.compute(self._duration)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    for module in (clock, events):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: made.now)
    return made


def communicator_of(device, duration):
    return Communicator(TakesTime(device, duration), StreamQueue(CPU, device), (0, 1), 0, "data", partial(mark, device))


def recorded(device, directory, train, *observed):
    """The row of ``steps`` and the collectives of one backward that ``train`` does."""
    write_manifest(directory, {"run": "x"})
    writer = RunWriter(directory, 0, "x", "measured")
    recorder = Recorder(writer, StreamClock(device), 0, device=CPU)
    with recorder.step(0):
        for comm in observed:
            comm._observers = (recorder,)
        with recorder.phase(Phase.BACKWARD, SpanKind.BACKWARD):
            train(recorder)
    recorder.finish_step(1.0, 1.0, 1.0, 1)
    writer.close()
    run = load_run(directory)
    return run.steps.iloc[0], run.collectives


@pytest.mark.parametrize(("between_ms", "exposed_ms"), [(0, 6), (4, 2), (6, 0), (9, 0)])
def test_a_stream_that_waits_does_not_compute(device, tmp_path, between_ms, exposed_ms):
    comm = communicator_of(device, 6 * MS)

    def train(_):
        device.compute(10 * MS)
        pending = comm.all_reduce(torch.ones(4))
        device.compute(between_ms * MS)
        pending.wait()
        device.compute(1 * MS)

    step, collectives = recorded(device, tmp_path, train, comm)
    assert step["exposed_comm_us"] == pytest.approx(1e3 * exposed_ms, abs=1)
    assert step["overlap"] == pytest.approx(1 - exposed_ms / 6, abs=1e-3)
    row = collectives.iloc[0]
    assert (row["start_us"], row["end_us"]) == pytest.approx((10e3, 16e3), abs=1)
    assert row["wait_end_us"] - row["wait_start_us"] == pytest.approx(1e3 * exposed_ms, abs=1)


@pytest.mark.parametrize(("computed_ms", "exposed_ms"), [(0, 6), (4, 2), (10, 0)])
def test_compute_under_way_goes_on_while_the_host_waits(device, tmp_path, computed_ms, exposed_ms):
    """As staged collectives do: the host sleeps until the thread is done, 6 ms after it began."""

    def train(recorder):
        event = CollectiveEvent(0, Collective.ALL_REDUCE, "data", "", "float32", 1, 4, 2, "staged", False, "")
        recorder.issued(event)
        event.start_ns, event.end_ns = 0, 6 * MS
        device.compute(computed_ms * MS)

        def sleep():
            device.now = 6 * MS

        Pending(sleep, event=event, observers=(recorder,), mark=partial(mark, device)).wait()

    step, _ = recorded(device, tmp_path, train)
    assert step["exposed_comm_us"] == pytest.approx(1e3 * exposed_ms, abs=1)


def test_nothing_in_a_step_lets_the_host_wait(device):
    comm = communicator_of(device, 6 * MS)
    before = device.num_synchronized
    for _ in range(3):
        comm.all_reduce(torch.ones(4)).wait()
    assert device.num_synchronized == before
    assert device.now == 0


def test_marks_are_exact_after_an_hour(device):
    """Two events tell their distance as a float32 of milliseconds, so the zero must not be far away."""
    clock_of_run = StreamClock(device)
    device.now = 3_600_000 * MS + 123_457
    marks = [clock_of_run.mark()]
    device.compute(7_000)
    marks.append(clock_of_run.mark())
    device.compute(200 * MS)
    clock_of_run.settle()
    begin, end = clock_of_run.resolve(marks)
    assert abs(begin - (3_600_000 * MS + 123_457)) < 100
    assert abs(end - begin - 7_000) < 100


def look(board, writer):
    writer.look_at_streams()
    row = board.read()[0]
    return row.state, row.seq


def test_a_hang_shows_the_collective_that_the_stream_never_ends(device, tmp_path):
    board = Board(tmp_path / "board", 1)
    writer = BoardWriter(board.path, 0)
    comm = communicator_of(device, inf)
    comm._observers = (writer,)
    comm.all_reduce(torch.ones(4)).wait()  # returns at once: the host has only told the stream to wait
    comm.all_reduce(torch.ones(4)).wait()
    device.now = 3_600_000 * MS
    assert look(board, writer) == (CallState.ISSUED, 0)


def test_nobody_need_wait_for_what_has_ended(device, tmp_path):
    board = Board(tmp_path / "board", 1)
    writer = BoardWriter(board.path, 0)
    comm = communicator_of(device, 6 * MS)
    comm._observers = (writer,)
    pending = [comm.all_reduce(torch.ones(4)) for _ in range(2)]
    assert look(board, writer) == (CallState.ISSUED, 0)
    device.now = 7 * MS
    assert look(board, writer) == (CallState.ISSUED, 1)
    device.now = 13 * MS
    assert look(board, writer) == (CallState.COMPLETED, 1)
    assert not any(one.waited for one in pending)


def test_the_end_is_told_once_and_only_when_it_has_come(device):
    comm, told = communicator_of(device, 6 * MS), []

    class Notes:
        def __getattr__(self, what):
            return lambda event: told.append((what, event.seq))

    comm._observers = (Notes(),)
    first = comm.all_reduce(torch.ones(4))
    first.wait()
    assert told == [("issued", 0), ("started", 0), ("waited", 0)]
    device.now = 6 * MS
    comm.all_reduce(torch.ones(4))
    device.now = 12 * MS
    comm.close()
    assert told[3:] == [("issued", 1), ("completed", 0), ("started", 1), ("completed", 1)]
