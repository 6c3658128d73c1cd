"""Small messages between ranks of a host: whole, in order, with times on which both ranks agree, and clear errors."""

import socket
import time

import numpy as np
import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.comm.transports.base import MismatchError
from shardlab.comm.transports.letters import LARGEST_BYTES, Inbox, Outbox
from shardlab.engines.plain_mode import nothing
from shardlab.launch import RankHang, RankPool
from tests.comm.test_communicator import Log

LARGEST = LARGEST_BYTES // 4
MANY = 100  # more than a kernel has room for


def more_than_there_is_room_for(rank):
    """Both send all before they receive any; nobody waits for a send until the end."""
    with Mesh({"data": 2}) as mesh:
        comm, own = mesh.data, [torch.full((LARGEST + at % 2,), float(at)) for at in range(MANY)]  # by letter, by gloo
        sent = [comm.send(one, 1 - rank) for one in own]
        got = [torch.empty_like(one) for one in own]
        received = [comm.recv(one, 1 - rank) for one in got]
        for one in (*reversed(received), *sent):  # a later one takes those before it
            one.wait()
        return all(map(torch.equal, own, got))


def test_letters_without_room_wait_beside_their_sender(pools):
    assert pools(2).run(more_than_there_is_room_for) == [True, True]


def of_any_kind(rank):
    with Mesh({"data": 2}) as mesh:
        same = []
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            for shape in ((), (0,), (3, 5)):
                values = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype)
                if rank:
                    mesh.data.send(values, 0).wait()
                else:
                    with torch.inference_mode():
                        got = torch.empty(shape[::-1], dtype=dtype).T if len(shape) == 2 else torch.empty_like(values)
                    mesh.data.recv(got, 1).wait()
                    same.append(torch.equal(got, values))
        return same


def test_every_dtype_and_layout_travels(pools):
    assert pools(2).run(of_any_kind)[0] == [True] * 15


def nothing_of_numpys(rank):
    nothing = torch.from_numpy(np.empty(0))  # its stride is 0, with which torch reads no bytes
    with Mesh({"data": 2}) as mesh:
        (mesh.data.send(nothing, 0) if rank else mesh.data.recv(nothing, 1)).wait()
        mesh.data.all_reduce(nothing).wait()
        mesh.data.broadcast(nothing, src=1).wait()
        return nothing.numel()


def test_an_empty_array_of_numpys_travels(pools):
    assert pools(2).run(nothing_of_numpys) == [0, 0]


def one_comes_late(rank, late, pause_s=0.2):
    """When the message came, and when this rank had waited, in seconds since it began."""
    log, tensor = Log(), torch.ones(4)
    with Mesh({"data": 2}) as mesh, mesh.observed_by(log):
        mesh.data.barrier().wait()
        began_ns = time.perf_counter_ns()
        if rank == late:
            time.sleep(pause_s)
        pending = mesh.data.send(tensor, 1) if rank == 0 else mesh.data.recv(tensor, 0)
        time.sleep(2 * pause_s)  # computes
        pending.wait()
        event = log.events[-1]
        assert event.issue_ns <= event.start_ns <= event.end_ns <= event.wait_end_ns
        return event.end_ns, (event.end_ns - began_ns) / 1e9, (event.wait_end_ns - event.wait_start_ns) / 1e9


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_has_come_when_both_are_there_however_late_they_look(pools, late):
    (ended, after_s, waited_s), (same, *_, received_s) = pools(2).run(one_comes_late, late)
    assert ended == same
    assert 0.15 < after_s < 0.39
    assert max(waited_s, received_s) < 0.15


def sends_to_nobody(rank, pause_s=0.2):
    with Mesh({"data": 2}) as mesh:
        mesh.data.barrier().wait()
        began = time.perf_counter()
        if rank == 0:
            mesh.data.send(torch.ones(4), 1).wait()
        else:
            time.sleep(pause_s)
            mesh.data.recv(torch.ones(4), 0).wait()
        return time.perf_counter() - began


def test_a_send_ends_with_its_receive(pools):
    assert min(pools(2).run(sends_to_nobody)) > 0.15


def meets_another(rank, numel, dtype):
    with Mesh({"data": 2}) as mesh:
        if rank == 0:
            mesh.data.send(torch.ones(4), 1).wait()
            return ""
        with pytest.raises(MismatchError) as caught:
            mesh.data.recv(torch.ones(numel, dtype=dtype), 0).wait()
        return str(caught.value)


@pytest.mark.parametrize(("numel", "dtype"), [(3, torch.float32), (5, torch.float32), (4, torch.int32)])
def test_a_message_of_another_size_is_refused(pools, numel, dtype):
    told = pools(2).run(meets_another, numel, dtype)[1]
    assert told == f"recv of {numel} {str(dtype).split('.')[1]} meets send of 4 float32 on rank 0 of the group"


@pytest.fixture
def boxes():
    """Of two ranks in one process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Outbox(ends[0], 1, timeout_s=0.1), Inbox(ends[1], 0, timeout_s=0.1)


def test_what_a_rank_has_sent_before_it_went_is_there(boxes):
    outbox, inbox = boxes
    outbox.send(torch.ones(4))
    outbox.close()
    tensor = torch.zeros(4)
    inbox.expect(tensor)(nothing)
    assert tensor.sum() == 4
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0 of the group has gone"):
            inbox.expect(tensor)(nothing)


def test_a_rank_that_does_not_come_ends_the_wait(boxes):
    outbox, inbox = boxes
    sent = outbox.send(torch.ones(4))
    with pytest.raises(RuntimeError, match="rank 1 of the group has not come within"):
        sent(nothing)
    assert inbox.expect(torch.ones(4))(nothing) == sent(nothing)
    with pytest.raises(RuntimeError, match="rank 0 of the group has not come within"):
        inbox.expect(torch.ones(4))(nothing)


def test_behind_a_letter_that_nobody_had_room_for_none_is_taken_in_its_place(boxes):
    outbox, inbox = boxes
    for number in range(MANY):
        outbox.send(torch.full((LARGEST,), float(number)))
    time.sleep(0.3)  # longer than a writer waits
    tensor, got = torch.empty(LARGEST), []
    with pytest.raises(RuntimeError, match="rank 0 of the group has gone"):
        while True:
            inbox.expect(tensor)(nothing)
            got.append(float(tensor[0]))
    assert 0 < len(got) < MANY
    assert got == [float(number) for number in range(len(got))]


def computes_behind_a_send(rank):
    with Mesh({"data": 2}) as mesh:
        if rank == 0:
            sent = mesh.data.send(torch.ones(4), 1)
            time.sleep(2.5)
            sent.wait()
        else:
            mesh.data.recv(torch.ones(4), 0).wait()


def sends_and_receives_nothing(rank):
    with Mesh({"data": 2}) as mesh:
        if rank == 0:
            sent = mesh.data.send(torch.ones(4), 1)
            mesh.data.recv(torch.ones(8), 1, tag="answer").wait()
            sent.wait()
        else:
            mesh.data.recv(torch.ones(4), 0).wait()
            time.sleep(60)


def test_a_hang_is_where_a_rank_waits_and_not_in_a_letter_that_has_come():
    with RankPool(2, device="cpu", timeout_s=1.0) as pool:
        pool.run(computes_behind_a_send)
        with pytest.raises(RankHang, match="rank 0 in recv 'answer' of 8 float32"):
            pool.run(sends_and_receives_nothing)
