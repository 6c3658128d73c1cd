"""Who begins a collective: the caller where nothing is under way, the queue's thread where something is; messages."""

import gc
import threading
import time
from contextlib import closing, nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.comm.transports.gloo import GlooTransport
from shardlab.comm.transports.letters import LARGEST_BYTES
from shardlab.launch import RankError, RankHang, RankPool
from shardlab.partition.ring_cost import Link
from shardlab.vocabulary import HostTransport
from tests.comm.test_communicator import Log

ELEMENTS, MANY = 64, LARGEST_BYTES  # many are no letter


class Threads(Log):
    """(what, collective, by the caller's thread or the queue's)."""

    def __init__(self):
        super().__init__()
        self.caller, self.threads = threading.get_ident(), []

    def _note(self, what, event):
        self.threads.append((what, event.seq, "caller" if threading.get_ident() == self.caller else "queue"))

    def started(self, event):
        self._note("started", event)

    def completed(self, event):
        self._note("completed", event)


def who_begins(rank):
    """One alone; then three at once, the first of which is slow; then one after a reduce-scatter that is under way."""
    watch, sums = Threads(), []
    with Mesh({"data": 2}, transport="gloo") as mesh, mesh.observed_by(watch):
        for number in (1, 3):
            tensors = [torch.full((ELEMENTS,), float(rank + at)) for at in range(number)]
            with slow_start() if number == 3 else nullcontext():
                pending = [mesh.data.all_reduce(tensor) for tensor in tensors]
                for one in pending:
                    one.wait()
            sums.append([float(tensor.sum()) for tensor in tensors])
        with torch.inference_mode():
            scattered, reduced = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
        pending = [mesh.data.reduce_scatter(scattered), mesh.data.all_reduce(reduced)]
        for one in pending:
            one.wait()
        sums.append([float(reduced.sum())])
    return sums, watch.threads


def slow_start():
    plain = GlooTransport.start_of_sum

    def slow(self, tensor, reduction):
        start = plain(self, tensor, reduction)
        return lambda: slow_end(start())

    def slow_end(finish):
        return lambda: (time.sleep(0.05), finish())

    return mock.patch.object(GlooTransport, "start_of_sum", slow)


def by_whom(calls, what):
    return [thread for called, _, thread in calls if called == what]


def test_the_caller_begins_only_what_has_nothing_before_it(pools):
    for sums, calls in pools(2).run(who_begins):
        assert sums == [[ELEMENTS], [ELEMENTS, 3 * ELEMENTS, 5 * ELEMENTS], [2 * ELEMENTS]]
        # 0 alone; 1 begins at once and 2 and 3 behind it do not; 4 is the reduce-scatter, and 5 waits for it.
        assert by_whom(calls, "started")[:4] == ["caller", "caller", "queue", "queue"]
        assert by_whom(calls, "started")[4] == "queue"
        assert by_whom(calls, "completed") == ["queue"] * 6
        order = [(what, seq) for what, seq, _ in calls if what in ("started", "completed")]
        assert order == [(what, seq) for seq in range(6) for what in ("started", "completed")]


def who_begins_messages(rank, transport, numel):
    """Three, of which the first cannot end before the other rank has come."""
    watch, tensors = Threads(), [torch.full((numel,), float(number if rank else -1)) for number in range(3)]
    with Mesh({"data": 2}, transport=transport) as mesh, mesh.observed_by(watch):
        verb = mesh.data.send if rank else mesh.data.recv
        for one in [verb(tensor, 1 - rank) for tensor in tensors]:
            one.wait()
    return [float(tensor[-1]) for tensor in tensors], watch.threads


@pytest.mark.parametrize(
    ("transport", "numel"), [("gloo", ELEMENTS), ("shared_memory", ELEMENTS), ("shared_memory", MANY)]
)
def test_the_caller_begins_messages_whatever_is_under_way(pools, transport, numel):
    is_letter = transport == "shared_memory" and numel == ELEMENTS
    for got, calls in pools(2).run(who_begins_messages, transport, numel):
        assert got == [0, 1, 2]
        started = by_whom(calls, "started")  # of a letter only where it has not come when the rank looks
        assert started == ["caller"] * (len(started) if is_letter else 3)
        assert by_whom(calls, "completed") == ["caller" if is_letter else "queue"] * 3


NO_SUM = {"gloo": "Invalid scalar type", "shared_memory": "float8_e4m3fn cannot be added"}


def refused(rank, transport, numel):
    """Nobody has a sum of float8: the error comes from wait(), on all ranks, and the axis still works."""
    with Mesh({"data": 2}, transport=transport) as mesh:
        pending = mesh.data.all_reduce(torch.ones(numel).to(torch.float8_e4m3fn))
        with pytest.raises(RuntimeError, match=NO_SUM[transport]):
            pending.wait()
        after = torch.ones(4)
        mesh.data.all_reduce(after).wait()
        return after.tolist()


@pytest.mark.parametrize("transport", HostTransport)
def test_what_cannot_begin_raises_where_it_is_waited_for(pools, transport):
    for numel in (1, 4):  # of one element only one rank has something to add
        assert pools(2).run(refused, transport, numel) == [[2.0] * 4] * 2


def nobody_waits(rank, waits, transport, number):
    with Mesh({"data": 2}, transport=transport) as mesh:
        first, *_ = [mesh.data.all_reduce(torch.ones(1).to(dtype)) for dtype in NOT_ADDED[:number]]
        if waits:
            with pytest.raises(RuntimeError, match=NO_SUM[transport]):
                first.wait()


NOT_ADDED = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(("transport", "number"), [("shared_memory", 2), ("gloo", 1)])  # gloo's fails unqueued
def test_closing_raises_the_first_error_if_nobody_waited_for_one(pools, transport, number):
    with pytest.raises(RankError, match=NO_SUM[transport]):
        pools(2).run(nobody_waits, False, transport, number)
    pools(2).run(nobody_waits, True, transport, number)


def handles(rank):
    """The error that the caller has handled has the caller's frames, and these have the mesh."""
    with suppress(RuntimeError), Mesh({"data": 2}) as mesh:
        for dtype in NOT_ADDED:
            mesh.data.all_reduce(torch.ones(1).to(dtype))
        mesh.data.all_reduce(torch.ones(1).to(dtype)).wait()


def queues_left(rank):
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("comm-")]


def test_a_mesh_dropped_after_an_error_leaves_no_thread(pools):
    pools(2).run(queues_left)
    for _ in range(2):
        pools(2).run(handles)
    assert pools(2).run(queues_left) == [[], []]


def raises_itself(rank, error):
    with closing(Mesh({"data": 2})) as mesh:
        mesh.data.all_reduce(torch.ones(1).to(NOT_ADDED[0]))
        raise error


@pytest.mark.parametrize("error", [ValueError("the user's own"), SystemExit("the user's own")])
def test_closing_leaves_the_callers_own_error_and_notes_on_it_what_nobody_waited_for(pools, capsys, error):
    with pytest.raises(RankError, match=f"raised {type(error).__name__}: the user's own") as caught:
        pools(2).run(raises_itself, error)
    note = "mesh: closing it raised RuntimeError: dtype: torch.float8_e4m3fn cannot be added"
    assert note in str(caught.value)
    assert note in "".join(capsys.readouterr())  # for who does not look at the error


def closes_in_a_handler(rank):
    try:
        raise ValueError("handled")
    except ValueError:
        with Mesh({"data": 2}) as mesh:
            mesh.data.all_reduce(torch.ones(1).to(NOT_ADDED[0]))


def closes_by_hand_in_a_handler(rank):
    mesh = Mesh({"data": 2})
    try:
        raise ValueError("handled")
    except ValueError:
        mesh.data.all_reduce(torch.ones(1).to(NOT_ADDED[0]))
        mesh.close()


def handles_one(rank, then):
    """Of one collective on each axis that fails on all ranks the first is waited for; one more may be issued then."""
    with Mesh({"replica": 2, "shard": 2}) as mesh:
        first, _ = [mesh[axis].all_reduce(torch.ones(1).to(NOT_ADDED[0])) for axis in mesh.axes]
        with pytest.raises(RuntimeError, match="float8_e4m3fn cannot be added"):
            first.wait()
        if then:
            mesh["replica"].all_reduce(torch.ones(1).to(NOT_ADDED[1]))


def fails_late(rank):
    """On the last axis, which waits for a slow link while the queue of the first one closes."""
    with Mesh({"replica": 2, "shard": 2}, link=Link(latency_us=50_000, bandwidth_gbps=10)) as mesh:
        mesh["shard"].barrier()
        mesh["shard"].all_reduce(torch.ones(1).to(NOT_ADDED[0]))


def test_closing_raises_what_nobody_has_been_told(pools, capsys):
    pools(2).run(closes_by_hand_in_a_handler)
    assert "closing it raised RuntimeError: dtype: torch.float8_e4m3fn cannot be added" in capsys.readouterr().out
    pools(4).run(handles_one, False)
    for num_ranks, story, dtype in (
        (2, closes_in_a_handler, "e4m3fn"),
        (4, partial(handles_one, then=True), "e5m2"),  # what failed after an error was told
        (4, fails_late, "e4m3fn"),
    ):
        with pytest.raises(RankError, match=f"float8_{dtype} cannot be added"):
            pools(num_ranks).run(story)


def nobody_sends(rank, folder):
    mesh = Mesh({"replica": 2, "shard": 2})
    try:
        for axis in mesh.axes:
            mesh[axis].recv(torch.ones(MANY), 1 - mesh[axis].rank)
        mesh.close()
    finally:
        with pytest.raises(RuntimeError, match="is closed"):
            mesh["replica"].barrier()
        (folder / str(rank)).touch()


def test_an_end_that_comes_while_a_mesh_closes_leaves_it_at_once(tmp_path):
    with RankPool(4, device="cpu", timeout_s=1.0) as pool, pytest.raises(RankHang):
        pool.run(nobody_sends, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def in_another_order(rank):
    """Rank 1 needs rank 2's message first, and rank 2 needs rank 0's, which that sends behind its one to rank 1."""
    with Mesh({"data": 3}) as mesh:
        comm, tensors = mesh.data, [torch.full((4,), 1.0), torch.full((4,), 2.0)]
        if rank == 0:
            pending = [comm.send(tensor, peer) for peer, tensor in enumerate(tensors, 1)]
        elif rank == 1:
            pending = [comm.recv(tensor, peer) for peer, tensor in zip((2, 0), tensors, strict=True)]
        else:
            comm.recv(tensors[0], 0).wait()
            pending = [comm.send(tensors[0] + 1, 1)]
        for one in pending:
            one.wait()
        return [float(tensor[0]) for tensor in tensors]


def test_a_send_does_not_wait_for_one_to_another_rank(pools):
    assert pools(3).run(in_another_order)[1] == [3.0, 1.0]


def of_the_same_memory(rank):
    with Mesh({"data": 2}) as mesh:
        sums = []
        for again in (mesh.data.all_reduce, mesh.data.broadcast):
            tensor = torch.full((300, 300), rank + 1.0)
            pending = [mesh.data.all_reduce(tensor), again(tensor.t())]
            for one in pending:
                one.wait()
            sums.append(tensor.unique().tolist())
    return sums


def test_a_strided_tensor_is_read_after_the_collective_before_it(pools):
    assert pools(2).run(of_the_same_memory) == [[[6.0], [3.0]]] * 2
