"""The verbs give what their names say, at 2, 3 and 4 ranks; sums are exact because they are sums of small integers."""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.mesh import Mesh
from shardlab.comm.observed_group import Process
from shardlab.partition.uneven import chunk_bounds
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import FLAG

WORLD_SIZES = (2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


class Log:
    """An observer that keeps the events; those of the flags by which ranks raise together only if it is to."""

    def __init__(self, *, flags=False):
        self.events = []
        self.calls = []
        self.keeps_flags = flags

    def issued(self, event):
        if event.tag != FLAG or self.keeps_flags:
            self.events.append(event)
        self.calls.append(("issued", event.seq))

    def __getattr__(self, what):
        if what not in ("started", "completed", "waited"):
            raise AttributeError(what)
        return lambda event: self.calls.append((what, event.seq))


def every_verb(rank, dtype):
    with Mesh({"data": torch.distributed.get_world_size()}) as mesh:
        comm = mesh.data
        size = comm.num_ranks
        summed = torch.arange(6).to(dtype).view(2, 3) * (rank + 1)
        comm.all_reduce(summed).wait()
        largest = torch.tensor([rank, -rank]).to(dtype)
        comm.all_reduce(largest, reduction="max").wait()
        bounds = chunk_bounds(7, size)
        buffer = torch.arange(7).to(dtype) * (rank + 1)
        outside = torch.empty(bounds[rank + 1] - bounds[rank], dtype=dtype)
        comm.reduce_scatter(buffer.clone(), outside, bounds=bounds).wait()
        comm.reduce_scatter(buffer, bounds=bounds).wait()
        gathered = torch.zeros(7, dtype=dtype)
        comm.all_gather(gathered, outside, bounds=bounds).wait()
        copied = torch.full((2, 2), rank).to(dtype)
        comm.broadcast(copied, src=1).wait()
        output = torch.zeros(size, dtype=dtype)
        comm.all_to_all(output, torch.arange(size).to(dtype) + 10 * rank).wait()
        from_left = torch.zeros(3, dtype=dtype)
        sent = comm.send(torch.full((3,), rank).to(dtype), dst=(rank + 1) % size)
        comm.recv(from_left, src=(rank - 1) % size).wait()
        sent.wait()
        comm.barrier().wait()
        own = buffer[bounds[rank] : bounds[rank + 1]]
        return summed, largest, outside, own, gathered, copied, output, from_left


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_every_verb(pools, num_ranks):
    factor = num_ranks * (num_ranks + 1) // 2
    bounds = chunk_bounds(7, num_ranks)
    for dtype in DTYPES:
        for rank, results in enumerate(pools(num_ranks).run(every_verb, dtype)):
            summed, largest, outside, own, gathered, copied, output, from_left = (part.tolist() for part in results)
            assert summed == [[0, factor, 2 * factor], [3 * factor, 4 * factor, 5 * factor]]
            assert largest == [num_ranks - 1, 0]
            expected = [factor * index for index in range(7)]
            assert outside == own == expected[bounds[rank] : bounds[rank + 1]]
            assert gathered == expected
            assert copied == [[1, 1], [1, 1]]
            assert output == [rank + 10 * src for src in range(num_ranks)]
            assert from_left == [(rank - 1) % num_ranks] * 3


def non_contiguous(rank):
    with Mesh({"data": 2}) as mesh:
        whole = torch.arange(24.0).view(4, 6) * (rank + 1)
        column = whole[:, 1]
        transposed = (torch.arange(6.0).view(2, 3) * (rank + 1)).t()
        mesh.data.all_reduce(column).wait()
        mesh.data.all_reduce(transposed).wait()
        copied = torch.full((3, 2), float(rank)).t()
        mesh.data.broadcast(copied, src=1).wait()
        return whole, transposed, copied


def test_non_contiguous_tensors_are_right_and_neighbours_untouched(pools):
    for rank, (whole, transposed, copied) in enumerate(pools(2).run(non_contiguous)):
        expected = torch.arange(24.0).view(4, 6) * (rank + 1)
        expected[:, 1] = torch.arange(24.0).view(4, 6)[:, 1] * 3
        assert torch.equal(whole, expected)
        assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t() * 3)
        assert torch.equal(copied, torch.ones(2, 3))


def events_of(rank, transport):
    log = Log()
    with Mesh({"data": 3}, transport=transport) as mesh:
        with mesh.observed_by(log):
            mesh.data.reduce_scatter(torch.ones(9), tag="first").wait()
            mesh.data.all_gather(torch.ones(9)).wait()
            mesh.data.all_reduce(torch.ones(10)).wait()
        mesh.data.barrier().wait()
    fields = [
        (event.op, event.tag, event.numel, event.num_bytes, wire_bytes(event), event.scratch_bytes)
        for event in log.events
    ]
    ordered = all(event.issue_ns <= event.start_ns <= event.end_ns <= event.wait_end_ns for event in log.events)
    return fields, log.calls, ordered, log.events[0].source_line


@pytest.mark.parametrize(("transport", "scratch_bytes"), [("gloo", 24), ("shared_memory", 0)])
def test_events_say_what_moved_in_order(pools, transport, scratch_bytes):
    for fields, calls, ordered, source_line in pools(3).run(events_of, transport):
        assert fields == [
            ("reduce_scatter", "first", 9, 36, 24.0, scratch_bytes),
            ("all_gather", "", 9, 36, 24.0, 0),
            ("all_reduce", "", 10, 40, pytest.approx(2 * 2 / 3 * 40), 0),
        ]
        assert ordered
        for seq in range(3):
            of_one = [name for name, number in calls if number == seq]
            assert of_one == ["issued", "started", "completed", "waited"]
        assert "test_communicator.py:" in source_line


def in_flight(rank):
    """The buffer's only name goes away before it is sent."""
    with Mesh({"data": 2}) as mesh:
        results = [torch.zeros(50_000) for _ in range(5)]
        pending = []
        for result in results:
            result += torch.full((50_000,), 1.0 + rank)
            pending.append(mesh.data.all_reduce(result))
        del result
        for one in pending:
            one.wait()
            one.wait()
            assert one.has_ended
        return [float(result.sum()) for result in results]


def test_waiting_is_idempotent_and_many_may_be_in_flight(pools):
    assert pools(2).run(in_flight) == [[150_000.0] * 5] * 2


def dropped_meshes(rank):
    for _ in range(20):
        with Mesh({"data": 2}) as mesh:
            mesh.data.barrier().wait()
    closed = len(Process.retired)
    for _ in range(8):
        with suppress(ValueError), Mesh({"data": 2}):
            raise ValueError("before anything is sent")
    for _ in range(20):
        comm = Mesh({"data": 2}).data  # the mesh is gone, and its communicator is not
        comm.barrier().wait()
    first = Mesh({"data": 2}).data
    second = Mesh({"data": 2}).data
    for comm in (first, second, first):
        comm.barrier().wait()
    return closed, len(Process.retired), len(dist.distributed_c10d._world.pg_map)


def test_groups_of_meshes_that_are_closed_left_by_an_error_or_dropped_do_not_pile_up(pools):
    """What stays: the default group, two that are in use, and up to two that wait for the next mesh."""
    for closed, retired, known in pools(2).run(dropped_meshes):
        assert closed == 1
        assert retired <= 2
        assert known <= 6


def alone_after_a_mesh(rank):
    with Mesh({"data": 2}) as mesh:
        mesh.data.barrier().wait()
    before = Process.retired
    Mesh.alone().close()
    return len(before) > 0 and set(before) <= set(Process.retired)


def test_a_mesh_of_one_rank_destroys_no_groups_that_others_may_still_use(pools):
    assert pools(2).run(alone_after_a_mesh) == [True, True]
