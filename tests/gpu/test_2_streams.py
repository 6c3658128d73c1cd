"""Real streams: what is exposed and hidden, NCCL's verbs in a queue, work that NCCL does not return, clocks, hangs."""

from functools import partial
from time import perf_counter_ns

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.async_queues import StreamQueue
from shardlab.comm.communicator import Communicator
from shardlab.comm.streams import CUDA, mark
from shardlab.comm.torch_engine_groups import TorchGroup
from shardlab.comm.transports.nccl import NcclTransport
from shardlab.launch.hang_board import Board, BoardWriter, CallState
from shardlab.records.store import RunWriter, load_run, write_manifest
from shardlab.trace.clock import StreamClock
from shardlab.trace.recorder import Recorder
from shardlab.vocabulary import Phase, SpanKind
from tests.comm.test_communicator import Log


def cycles_per_ms():
    torch.cuda._sleep(1_000_000)  # the first call loads the kernel
    begin = mark(CUDA)
    torch.cuda._sleep(100_000_000)
    end = mark(CUDA)
    end.synchronize()
    return 100_000_000 / begin.elapsed_time(end)


class Sleeps:
    """A transport whose all-reduce keeps its stream busy for a known time, on a single multiprocessor."""

    name, emulated = "nccl", False

    def __init__(self, cycles):
        self._cycles = int(cycles)

    def all_reduce(self, tensor, reduction, tag=""):
        torch.cuda._sleep(self._cycles)


@pytest.fixture(scope="module")
def per_ms():
    return cycles_per_ms()


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def communicator_of(device, cycles):
    return Communicator(Sleeps(cycles), StreamQueue(device), (0, 1), 0, "data", partial(mark, CUDA))


@pytest.mark.parametrize("between_ms", [0, 20, 60])
def test_exposed_time_is_what_the_computing_stream_waits(device, per_ms, tmp_path, figure, between_ms):
    comm, tensor = communicator_of(device, 40 * per_ms), torch.ones(4, device=device)
    write_manifest(tmp_path, {"run": "x"})
    writer = RunWriter(tmp_path, 0, "x", "measured")
    recorder = Recorder(writer, StreamClock(CUDA), perf_counter_ns(), device=device)
    with comm.observed_by(recorder), recorder.step(0), recorder.phase(Phase.BACKWARD, SpanKind.BACKWARD):
        torch.cuda._sleep(int(10 * per_ms))
        pending = comm.all_reduce(tensor)
        torch.cuda._sleep(int(between_ms * per_ms))
        pending.wait()
        torch.cuda._sleep(int(5 * per_ms))
    recorder.finish_step(1.0, 1.0, 1.0, 1)
    writer.close()
    comm.close()
    run = load_run(tmp_path)
    step, row = run.steps.iloc[0], run.collectives.iloc[0]
    expected_ms = max(40 - between_ms, 0)
    figure(f"exposed of 40 ms behind {between_ms} ms of compute", f"{step['exposed_comm_us'] / 1e3:.2f} ms")
    assert row["end_us"] - row["start_us"] == pytest.approx(40e3, rel=0.1)
    assert step["exposed_comm_us"] == pytest.approx(1e3 * expected_ms, abs=4e3)


def test_a_hang_is_seen_and_an_end_that_nobody_waits_for(device, per_ms, tmp_path):
    board = Board(tmp_path / "board", 1)
    writer = BoardWriter(board.path, 0)
    comm = communicator_of(device, 300 * per_ms)
    with comm.observed_by(writer):
        comm.all_reduce(torch.ones(4, device=device)).wait()
    writer.look_at_streams()
    assert board.read()[0].state is CallState.ISSUED
    torch.cuda.synchronize()
    writer.look_at_streams()
    assert board.read()[0].state is CallState.COMPLETED
    comm.close()


def test_the_clock_of_the_device_is_the_hosts(device, per_ms, figure):
    clock = StreamClock(CUDA)
    began_ns = perf_counter_ns()
    first = clock.mark()
    torch.cuda._sleep(int(50 * per_ms))
    second = clock.mark()
    clock.settle()
    begin_ns, end_ns = clock.resolve([first, second])
    figure("a mark after the host's reading", f"{(begin_ns - began_ns) / 1e3:.1f} us")
    assert abs(begin_ns - began_ns) < 5e6
    assert end_ns - begin_ns == pytest.approx(50e6, rel=0.1)


def every_verb(rank):
    """Through NcclTransport and StreamQueue, in a group of one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport, queue = NcclTransport(dist.group.WORLD), StreamQueue(device)
    comm = Communicator(transport, queue, (0, 1), 0, "data", partial(mark, CUDA))
    found = {}

    def do(name, buffer, job):
        event = comm.announce("all_reduce", [buffer], name)
        queue.submit(job, event, ())()
        torch.cuda.synchronize()
        found[name] = buffer.cpu(), event.device_times[0].elapsed_time(event.device_times[1])

    for dtype in (torch.float32, torch.bfloat16):
        values = torch.arange(1024, device=device).to(dtype)
        do(f"all_reduce {dtype}", values, partial(transport.all_reduce, values, "sum"))
    values, output = torch.arange(1024.0, device=device), torch.zeros(1024, device=device)
    do("reduce_scatter", output, partial(transport.reduce_scatter, output, values, (0, 1024)))
    do("all_gather", values, partial(transport.all_gather, values, (0, 1024)))
    do("all_to_all", output, partial(transport.all_to_all, output, values))
    for dtype in (torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64):
        values = torch.zeros(1024, device=device).to(dtype)
        do(f"broadcast {dtype}", values, partial(transport.broadcast, values, 0))
    barrier = torch.zeros(1, device=device)
    do("barrier", barrier, transport.barrier)
    comm.close()
    return found


def test_every_verb_of_nccl_in_a_queue(gpu_pools, figure):
    (found,) = gpu_pools(1).run(every_verb)
    expected = torch.arange(1024.0)
    for name in ("reduce_scatter", "all_gather", "all_to_all"):
        assert torch.equal(found[name][0], expected), name
    for name, (_, ms) in found.items():
        assert ms >= 0, name
    figure("all-reduce of 4 kB by NCCL in a group of one", f"{1e3 * found['all_reduce torch.float32'][1]:.1f} us")


def without_work(rank):
    """With ``async_op=False`` NCCL returns no work; the group around it does."""
    device = torch.device("cuda", torch.cuda.current_device())
    comm = Communicator(NcclTransport(dist.group.WORLD), None, (0, 1), 0, "data")
    notes, found = Log(), []
    with comm.observed_by(notes):
        group = TorchGroup(dist.group.WORLD, comm, lambda op: f"{op}")
        for is_async in (False, True):
            options = dist.AllreduceOptions()
            options.asyncOp = is_async
            plain = dist.group.WORLD.allreduce([torch.ones(4, device=device)], options)
            work = group.allreduce([torch.ones(1 << 20, device=device)], options)
            work.wait()
            torch.cuda.synchronize()
            found.append((plain is None, isinstance(work, dist.Work), work.is_completed()))
        group.close()
    waits = [event.device_wait[0].elapsed_time(event.device_wait[1]) for event in notes.events]
    return found, waits


def test_no_work_of_nccl_becomes_work(gpu_pools, figure):
    ((no_work, work), waits) = gpu_pools(1).run(without_work)[0]
    assert no_work[1:] == work[1:] == (True, True)
    figure("NCCL returns no work with async_op=False", no_work[0])
    assert all(wait >= 0 for wait in waits)
