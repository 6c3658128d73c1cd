"""Small messages between two ranks of a host: matched as over gloo, never lost, their times known, failures told."""

import socket
import time
import weakref
from datetime import timedelta

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.comm.transports.small_messages import MOST_BYTES, SmallMessages
from shardlab.launch import RankError, RankPool, current
from tests.comm.test_communicator import Log

SMALL, LARGE = MOST_BYTES // 4, MOST_BYTES // 4 + 1  # elements of float32


def in_any_order(rank):
    """Two kinds of small messages and one of large ones, each kind received in the order in which it was sent."""
    sizes = [3, SMALL, 3, LARGE, SMALL, 3, LARGE, 0]
    with Mesh({"data": 2}, transport="shared_memory") as mesh:
        if rank == 0:
            for one in [mesh.data.send(torch.full((size,), float(at)), 1) for at, size in enumerate(sizes)]:
                one.wait()
            return None
        order = [7, 3, 1, 0, 4, 2, 6, 5]
        tensors = {at: torch.full((sizes[at],), -1.0) for at in order}
        pending = [mesh.data.recv(tensors[at], 0) for at in order]
        for one in pending[::-1]:
            one.wait()
        return [tensors[at].unique().tolist() for at in range(len(sizes))]


def test_messages_of_a_kind_come_in_their_order_whatever_comes_between(pools):
    assert pools(2).run(in_any_order)[1] == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], []]


def many_before_any_is_received(rank, number):
    with Mesh({"data": 2}, transport="shared_memory") as mesh:
        sent = [mesh.data.send(torch.full((SMALL,), rank + 2.0 * at), 1 - rank) for at in range(number)]
        columns = [torch.zeros(2, SMALL // 2).t() for _ in range(number)]  # no flat memory of their own
        for column in columns:
            mesh.data.recv(column, 1 - rank).wait()
        for one in sent:
            one.wait()
        return [column.unique().tolist() for column in columns]


def test_more_than_the_socket_holds_waits_for_room_and_keeps_its_order(pools):
    found = pools(2).run(many_before_any_is_received, 60)
    assert found == [[[1 - rank + 2.0 * at] for at in range(60)] for rank in range(2)]


def looked_at(rank):
    """One that has come is noticed while the caller computes, with the time since when it was there."""
    log, tensor = Log(), torch.zeros(4)
    with Mesh({"data": 2}, transport="shared_memory") as mesh, mesh.observed_by(log):
        if rank:
            mesh.data.send(tensor + 1, 0).wait()
            mesh.data.barrier().wait()
            return None
        pending = mesh.data.recv(tensor, 1)
        mesh.data.barrier().wait()
        before = pending.has_ended
        came_ns = time.perf_counter_ns()
        for _ in range(2):
            current().board.look_at_messages()
        event = log.events[0]
        after = pending.has_ended, event.look is None, tensor.tolist(), event.start_ns <= event.end_ns <= came_ns
        pending.wait()
        return before, after, event.end_ns <= event.wait_start_ns, [what for what, seq in log.calls if not seq]


def test_one_that_has_come_is_noticed_before_anybody_waits(pools):
    found = pools(2).run(looked_at)[0]
    assert found[1:] == ((True, True, [1.0] * 4, True), True, ["issued", "started", "completed", "waited"])


def left_behind(rank):
    """Who closes the mesh waits for what it expects, as for all other messages."""
    tensor = torch.zeros(4)
    with Mesh({"data": 2}, transport="shared_memory") as mesh:
        if rank:
            time.sleep(0.1)
            mesh.data.send(tensor + 1, 0)
        else:
            mesh.data.recv(tensor, 1)
    return tensor.tolist()


def test_a_mesh_that_closes_waits_for_what_it_expects(pools):
    assert pools(2).run(left_behind)[0] == [1.0] * 4


def one_ends(rank):
    mesh = Mesh({"data": 2}, transport="shared_memory")
    if rank:
        raise ValueError("this one")
    mesh.data.recv(torch.zeros(4), 1).wait()


def test_a_rank_that_ends_ends_the_wait():
    with RankPool(2, device="cpu", timeout_s=30) as pool, pytest.raises(RankError, match="this one"):
        pool.run(one_ends)


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield [SmallMessages(end, 1 - rank, timedelta(seconds=0.1)) for rank, end in enumerate(ends)]
    for end in ends:
        end.close()


def test_who_does_not_come_is_named_and_a_late_message_still_counts(pair):
    here, there = pair
    expected = here.expect(1, first := torch.zeros(2, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"message: rank 1 of the group has not come within 0.1 s"):
            expected.wait()
        assert not expected.has_come()
    waiting = here.expect(2, torch.zeros(3, dtype=torch.uint8))
    held = weakref.ref(waiting)
    assert not waiting.has_come()
    here._expected[2].clear()
    del waiting
    assert held() is None, "a look leaves nothing that holds the memory"
    there.send(1, first + 7)
    assert expected.wait() <= time.perf_counter_ns()
    assert first.tolist() == [7, 7]
    there._peer.close()
    assert not here.expect(1, first).has_come()
    for call in (here.expect(1, first).wait, lambda: here.send(1, first)):
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 of the group has gone"):
            call()


def test_a_send_without_room_says_who_does_not_read(pair):
    here, _ = pair
    full = torch.zeros(MOST_BYTES, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"rank 1 of the group has not come within 0.1 s"):
        for _ in range(1000):
            here.send(1, full)
    late = here.start_send(1, full)
    assert late is not None
    assert here.start_send(1, full[:1]) is not None, "a small one would overtake"
