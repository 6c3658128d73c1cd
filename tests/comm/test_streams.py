"""Streams whose work takes a known time: what is hidden, what is exposed, when it was, and what hangs."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from shardlab.comm import events
from shardlab.comm.async_queues import StreamQueue
from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Pending
from shardlab.comm.streams import mark
from shardlab.comm.transports.nccl import NcclTransport
from shardlab.launch.hang_board import Board, BoardWriter, CallState
from shardlab.records.store import RunWriter, load_run, write_manifest
from shardlab.trace import clock
from shardlab.trace.clock import StreamClock
from shardlab.trace.recorder import Recorder
from shardlab.vocabulary import Collective, Phase, SpanKind
from tests.comm.device_streams import Device
from tests.comm.test_communicator import Log

MS = 1_000_000
CPU = torch.device("cpu")


class TakesTime:
    """A transport whose calls only enqueue, as NCCL's do."""

    name, emulated = "nccl", False

    def __init__(self, device, duration):
        self._device, self._duration, self.exchanged = device, duration, []

    def start_of_sum(self, tensor, reduction):
        """Only the queue can."""

    def letter_of(self, message):
        """None of them."""

    def all_reduce(self, tensor, reduction, tag=""):
        self._device.compute(self._duration)

    def exchange(self, messages):
        self.exchanged.append([("send" if message.is_send else "recv", message.peer) for message in messages])
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


@pytest.mark.parametrize(("between_ms", "exposed_ms"), [(4, 2), (9, 0)])
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


@pytest.mark.parametrize(("computed_ms", "exposed_ms"), [(4, 2), (10, 0)])
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


def among_four(device):
    transport = TakesTime(device, 6 * MS)
    queue = StreamQueue(CPU, device)
    return Communicator(transport, queue, (0, 1, 2, 3), 1, "data", partial(mark, device)), transport.exchanged


def test_a_send_and_a_receive_travel_together(device):
    """On one stream, two ranks that send before they receive would wait for each other for ever."""
    for waits_for in (0, 1):
        comm, exchanged = among_four(device)
        pending = [comm.send(torch.ones(4), 2), comm.recv(torch.ones(4), 2)]
        assert exchanged == []
        pending[waits_for].wait()
        assert exchanged == [[("send", 2), ("recv", 2)]]
        pending[1 - waits_for].wait()
        assert len(exchanged) == 1


def test_a_receive_leaves_later_ones_behind(device):
    """What rank 0 sends may be what rank 2's answer needs first."""
    comm, exchanged = among_four(device)
    first, later = comm.recv(torch.ones(4), 0), comm.recv(torch.ones(4), 2)
    first.wait()
    assert exchanged == [[("recv", 0)]]
    comm.send(torch.ones(4), 2).wait()
    later.wait()
    assert exchanged == [[("recv", 0)], [("recv", 2), ("send", 2)]]


def test_messages_leave_before_a_collective_and_at_the_end(device):
    for then in ("all_reduce", "close"):
        comm, exchanged = among_four(device)
        pending = comm.recv(torch.zeros(4, 2)[:, 0], 0)
        comm.all_reduce(torch.ones(4)) if then == "all_reduce" else comm.close()
        assert exchanged == [[("recv", 0)]]
        pending.wait()


def around_the_ring(rank):
    """The stream's way with real messages: gloo in the place of NCCL, each too large for a socket to take at once."""
    size, numel = dist.get_world_size(), 1 << 20
    queue = StreamQueue(CPU, Device())
    comm = Communicator(NcclTransport(dist.group.WORLD), queue, tuple(range(size)), rank, "data")
    neighbours = [(rank + 1) % size, (rank - 1) % size]
    sent = [comm.send(torch.full((numel,), rank, dtype=torch.int16), to) for to in neighbours]
    came = [torch.zeros(numel, dtype=torch.int16) for _ in neighbours]
    received = [comm.recv(tensor, at) for tensor, at in zip(came, neighbours, strict=True)]
    for pending in (*sent, *received):
        pending.wait()
    comm.close()
    return [tensor.unique().tolist() for tensor in came]


def test_all_ranks_may_send_before_they_receive(pools):
    for rank, came in enumerate(pools(3).run(around_the_ring)):
        assert came == [[(rank + 1) % 3], [(rank - 1) % 3]]


def look(board, writer):
    writer.look_at_streams()
    row = board.read()[0]
    return row.state, row.seq


def test_a_hang_shows_what_the_stream_has_not_ended_and_nobody_need_wait_for_what_it_has(device, tmp_path):
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
    assert all(one._finish is not None for one in pending)


def test_the_end_is_told_once_and_only_when_it_has_come(device):
    comm, log = communicator_of(device, 6 * MS), Log()
    comm._observers = (log,)
    comm.all_reduce(torch.ones(4)).wait()
    assert log.calls == [("issued", 0), ("started", 0), ("waited", 0)]
    device.now = 6 * MS
    comm.all_reduce(torch.ones(4))
    device.now = 12 * MS
    comm.close()
    assert log.calls[3:] == [("issued", 1), ("completed", 0), ("started", 1), ("completed", 1)]
