"""The group that torch's engines get, over one that does what NCCL may do: returns no work, raises, or ends late."""

import gc
from datetime import timedelta
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist

from shardlab.comm import events, torch_engine_groups
from shardlab.comm.communicator import Communicator
from shardlab.comm.torch_engine_groups import TorchGroup
from shardlab.comm.torch_times import EventWaits, FutureTimes, StreamTimes, listen
from tests.comm.device_streams import Device
from tests.comm.test_communicator import Log

MS = 1_000_000


class LateWork(dist.Work):
    """NCCL's: ``wait`` lets the current stream wait, and the host goes on."""

    def __init__(self, device, end):
        super().__init__()
        self._device, self._end = device, end

    def wait(self, timeout=timedelta(0)):
        self._device.current_stream().wait_event(self._end)
        return True

    def is_completed(self):
        return self._end.query()

    def get_future(self):
        done = torch.futures.Future()
        done.set_result(None)
        return done


class LikeNccl:
    """A group whose collectives take 6 ms on a stream of its own or, with ``async_op=False``, on the current one."""

    def __init__(self, device):
        self._device, self._stream = device, device.Stream()

    def allreduce(self, tensors, options):
        if options == "raises":
            raise RuntimeError("NCCL error")
        if options == "sync":
            self._device.compute(6 * MS)
            return None
        self._stream.wait_stream(self._device.current_stream())
        end = self._device.Event()
        with self._device.stream(self._stream):
            self._device.compute(6 * MS)
            end.record()
        return LateWork(self._device, end)


class Sends:
    name, emulated = "nccl", False


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch_engine_groups, "StreamTimes", lambda: StreamTimes(made))
    for module in (events, torch_engine_groups):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: made.now)
    return made


@pytest.fixture
def observer():
    return Log()


@pytest.fixture
def group(device, observer):
    comm = Communicator(Sends(), None, (0, 1), 0, "data")
    comm._observers = (observer,)
    made = TorchGroup(LikeNccl(device), comm, lambda op: f"{op}")
    yield made
    made.close()


def times_of(marks):
    return tuple(mark.time for mark in marks)


def test_no_work_becomes_work_that_is_done_on_the_stream(device, group, observer):
    device.compute(10 * MS)
    work = group.allreduce([torch.ones(4)], "sync")
    assert isinstance(work, dist.Work)
    assert work.wait()
    event = observer.events[0]
    assert times_of(event.device_times) == (10 * MS, 16 * MS)
    assert times_of(event.device_wait) == (10 * MS, 16 * MS)  # the stream that computes did nothing else meanwhile
    assert not work.is_completed()
    device.now = 16 * MS
    assert work.is_completed()
    assert work.get_future().done()


def waited(event):
    """When the computing stream began and ended to wait, as the recorder reads it."""
    *begins, end = times_of(event.device_wait)
    return max(begins), max(*begins, end)


@pytest.fixture
def record(device, group):
    """``record(stream)``: an event behind what a stream runs, of which the group hears as of CUDA's."""

    def recorded(stream):
        marker = device.Event()
        marker.record(stream)
        group.times._waits.recorded(stream, marker)
        return marker

    return recorded


def test_no_work_on_a_stream_beside_compute_is_waited_for_by_an_event(device, group, observer, record):
    """FSDP2 gathers so."""
    beside = device.Stream()
    with device.stream(beside):
        group.allreduce([torch.ones(4)], "sync").wait()
    device.compute(4 * MS)
    assert observer.events[0].device_wait is None
    assert times_of(observer.events[0].device_times) == (0, 6 * MS)
    group.times._waits.waits(device.default_stream(), record(beside))
    assert waited(observer.events[0]) == (4 * MS, 6 * MS)


def test_two_on_one_stream_and_a_third_that_follows_it(device, group, observer, record):
    """As in a hybrid FSDP2: a reduce-scatter, then an all-reduce on another stream; compute waits for the last."""
    scatters, reduces = device.Stream(), device.Stream()
    with device.stream(scatters):
        group.allreduce([torch.ones(4)], "sync").wait()
        group.allreduce([torch.ones(4)], "sync").wait()
    behind = record(scatters)
    reduces.wait_event(behind)
    group.times._waits.waits(reduces, behind)
    with device.stream(reduces):
        group.allreduce([torch.ones(4)], "sync").wait()
    device.compute(8 * MS)
    group.times._waits.waits(device.default_stream(), record(reduces))
    assert [waited(event) for event in observer.events] == [(8 * MS, 8 * MS), (8 * MS, 12 * MS), (12 * MS, 18 * MS)]


def test_the_futures_that_cpp_waits_for(device, group, observer):
    """DDP's: the stream begins to wait at the end of backward, behind the last issue, for one after another."""
    works = []
    for _ in range(3):
        device.compute(5 * MS)
        works.append(group.allreduce([torch.ones(4)], "async"))
        works[-1].get_future()
    group.end_waits()
    assert [times_of(event.device_times) for event in observer.events] == [
        (5 * MS, 11 * MS), (11 * MS, 17 * MS), (17 * MS, 23 * MS),
    ]  # fmt: skip
    assert [waited(event) for event in observer.events] == [(15 * MS, 15 * MS), (15 * MS, 17 * MS), (17 * MS, 23 * MS)]


def test_cudas_streams_are_left_as_they_were(device):
    plain = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event
    ends = [listen(EventWaits(device)) for _ in range(2)]
    for end in ends:
        assert torch.cuda.Stream.wait_event is not plain[1]
        end()
    assert (torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event) == plain


def test_work_that_ends_late(device, group, observer):
    device.compute(10 * MS)
    work = group.allreduce([torch.ones(4)], "async")
    device.compute(4 * MS)
    work.wait()
    event = observer.events[0]
    assert times_of(event.device_times) == (10 * MS, 16 * MS)
    assert times_of(event.device_wait) == (14 * MS, 16 * MS)
    assert "completed" not in [what for what, _ in observer.calls]
    device.now = 16 * MS
    group.allreduce([torch.ones(4)], "async")
    assert [what for what, _ in observer.calls].count("completed") == 1


def test_a_call_that_raises_is_not_followed(device, group, observer):
    with pytest.raises(RuntimeError, match="NCCL error"):
        group.allreduce([torch.ones(4)], "raises")
    group.allreduce([torch.ones(4)], "async").wait()
    assert [what for what, _ in observer.calls] == ["issued", "completed", "issued", "started", "waited"]


def test_no_work_where_the_script_calls_torch_itself(device, observer):
    """``script_collectives`` follows by the work's future, of which there is none."""
    times = FutureTimes(device)
    times.close()
    event = Communicator(Sends(), None, (0, 1), 0, "data").announce("all_reduce", [torch.ones(4)], "")
    assert times.follow(lambda: device.compute(6 * MS), event, (observer,)) is None
    assert times_of(event.device_times) == times_of(event.device_wait) == (0, 6 * MS)


def test_torch_may_ask_what_sends_for_a_device():
    """As it does of every new group where the default group is bound to a GPU."""
    group = TorchGroup.__new__(TorchGroup)
    assert not group._get_backend(torch.device("cuda", 0)).supports_splitting


def test_a_closed_group_keeps_nobody_who_listened(device, group, observer):
    """Torch may hold it for ever, and a recorder knows an engine, which so stayed on the device until the end."""
    for _ in range(2):
        group.allreduce([torch.ones(4)], "async").get_future()
    group.close()
    found, seen = [group], set()
    while found:
        held = found.pop()
        if id(held) not in seen and not isinstance(held, type | ModuleType | FunctionType):
            seen.add(id(held))
            found += gc.get_referents(held)
    assert id(observer) not in seen
