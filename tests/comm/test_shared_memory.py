"""Through memory that all ranks see: the same bits as over gloo, clear errors, and nothing left behind."""

import contextlib
import gc
import os
import socket
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from shardlab.comm.mesh import Mesh
from shardlab.comm.signed_messages import SECRET
from shardlab.comm.transports import rendezvous
from shardlab.comm.transports.base import MismatchError
from shardlab.comm.transports.gloo import GlooTransport
from shardlab.comm.transports.rendezvous import share_buffers
from shardlab.comm.transports.shared_memory import SharedMemoryTransport
from shardlab.launch import RankError
from tests.comm.test_communicator import Log

SHORT = timedelta(seconds=20)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def transport(half_bytes=48, timeout=SHORT):
    """Over all ranks; with so small a half each message goes in many segments."""
    group = dist.group.WORLD
    shared = share_buffers(group, timeout, half_bytes)
    assert shared is not None
    return SharedMemoryTransport(group, shared)


def data(rank, numel, dtype):
    return (100 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).to(dtype)


REDUCED = [(numel, dtype, half) for numel in (0, 1, 2, 25) for dtype in DTYPES for half in (48, rendezvous.HALF_BYTES)]


def reduced(rank):
    found = []
    for numel, dtype, half_bytes in REDUCED:
        shared, tensor = transport(half_bytes), data(rank, numel, dtype)
        shared.all_reduce(tensor, "sum")
        shared.close()
        found.append(tensor)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_reduce_adds_in_the_order_of_the_ranks(pools, num_ranks):
    for (numel, dtype, _), *results in zip(REDUCED, *pools(num_ranks).run(reduced), strict=True):
        expected = data(0, numel, dtype)
        for rank in range(1, num_ranks):
            expected += data(rank, numel, dtype)
        assert all(torch.equal(tensor, expected) for tensor in results)


def as_over_gloo(rank, bounds, dtype, half_bytes):
    """Of every sharded collective, whether it did what gloo does, bit for bit, and touched nothing else."""
    shared, gloo, same = transport(half_bytes), GlooTransport(dist.group.WORLD), []
    for in_place in (True, False):
        results = []
        for way in (shared, gloo):
            buffer = data(rank, bounds[-1], dtype)
            before, chunk = buffer.clone(), buffer[bounds[rank] : bounds[rank + 1]]
            output = chunk if in_place else torch.empty_like(chunk)
            way.reduce_scatter(output, buffer, bounds)
            same.append(in_place or torch.equal(buffer, before))
            results.append(output.clone())
        same.append(torch.equal(*results))
    results = []
    for way in (shared, gloo):
        buffer = data(rank, bounds[-1], dtype)
        way.all_gather(buffer, bounds)
        results.append(buffer)
    shared.close()
    return [*same, torch.equal(*results)]


@pytest.mark.parametrize("bounds", [(0, 11, 24), (0, 7, 7, 90), (0, 5, 17, 18, 40)], ids=["2", "3", "4"])
def test_chunks_are_those_of_gloo(pools, bounds):
    num_ranks = len(bounds) - 1
    for dtype, half_bytes in ((torch.float32, 48), (torch.bfloat16, 48), (torch.float32, rendezvous.HALF_BYTES)):
        assert pools(num_ranks).run(as_over_gloo, bounds, dtype, half_bytes) == [[True] * 7] * num_ranks


def hurried(rank, rounds):
    """Ranks that run ahead of each other by as much as they can never see what is not meant for them."""
    shared, seen = transport(rendezvous.HALF_BYTES), []
    for number in range(rounds):
        tensor = torch.full((4,), float(rank + number))
        shared.all_reduce(tensor, "sum")
        chunk = torch.full((2,), -1.0)
        chunk[rank] = rank + 10 * number
        shared.all_gather(chunk, (0, 1, 2))
        seen.append((float(tensor[3]), *chunk.tolist()))
    shared.close()
    return seen


def test_halves_take_turns(pools):
    expected = [(1.0 + 2 * number, 10.0 * number, 10.0 * number + 1) for number in range(300)]
    assert pools(2).run(hurried, 300) == [expected] * 2


def names(rank, transports):
    log = Log()
    for wanted in transports:
        with Mesh({"data": dist.get_world_size()}, transport=wanted) as mesh, mesh.observed_by(log):
            mesh.data.barrier().wait()
    return [event.transport for event in log.events]


def test_a_mesh_says_how_it_sends(pools):
    assert pools(2).run(names, (None, "gloo", "shared_memory")) == [["shared_memory", "gloo", "shared_memory"]] * 2
    with pytest.raises(RankError, match="transport: 'udp' is not one of shared_memory, gloo"):
        pools(2).run(names, ("udp",))


def apart(rank, transports):
    """As if every rank were on a host of its own."""
    with mock.patch.object(rendezvous, "_host", return_value=f"host {rank}"):
        return names(rank, transports)


def cloned(rank, transports):
    """As if the ranks were on two copies of one virtual machine: the same name, and nobody under the address."""
    plain = rendezvous._listen

    def elsewhere():
        listener, endpoint = plain()
        return listener, endpoint._replace(address=endpoint.address + "-there")

    with mock.patch.object(rendezvous, "_listen", plain if rank else elsewhere):
        return names(rank, transports)


def visited(rank):
    """A stranger connects to rank 0 before rank 1 does, and answers with a secret of its own."""
    plain, strangers = rendezvous._connected, []

    def after_a_stranger(rank, endpoints):
        for said in (rendezvous._HELLO.pack(1, b"x" * 32), b"short"):
            if rank == 1:
                strangers.append(stranger := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stranger.connect(endpoints[0].address)
                stranger.send(said)
        return plain(rank, endpoints)

    with mock.patch.object(rendezvous, "_connected", after_a_stranger), Mesh({"data": 2}) as mesh:
        mesh.data.all_reduce(total := torch.ones(3)).wait()
        refused = []
        for stranger in strangers:
            with contextlib.closing(stranger), contextlib.suppress(ConnectionResetError):
                refused.append(not stranger.recv(1))
        return mesh.data.transport, total.tolist(), all(refused)


def test_who_does_not_know_the_secret_gets_no_memory(pools):
    assert pools(2).run(visited) == [("shared_memory", [2.0, 2.0, 2.0], True)] * 2


def test_another_user_gets_no_memory(monkeypatch):
    monkeypatch.setenv(SECRET, "of these ranks")
    own = rendezvous._Endpoint("host", "address")
    for user, expected in ((os.geteuid(), 1), (os.geteuid() + 1, None)):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:
            there.send(own.hello(1))
            monkeypatch.setattr(os, "geteuid", lambda user=user: user)
            assert rendezvous._rank_of(here, own) == expected


@pytest.mark.parametrize("somewhere", [apart, cloned])
def test_ranks_that_share_no_memory_use_gloo(pools, somewhere):
    assert pools(2).run(somewhere, (None,)) == [["gloo"]] * 2
    with pytest.raises(RankError, match="transport: 'shared_memory' needs all ranks of an axis on one host"):
        pools(2).run(somewhere, ("shared_memory",))


def going_on_after_a_mismatch(rank):
    shared, errors = transport(), []
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            shared.all_gather(torch.ones(8), (0, 4, 8)) if rank else shared.all_reduce(torch.ones(8), "sum")
        errors.append(str(caught.value))
    return errors


def test_after_a_mismatch_nobody_waits_for_more(pools):
    for first, again in pools(2).run(going_on_after_a_mismatch):
        assert first == again
        assert "meets" in first


def of_other_sizes(rank):
    with pytest.raises(MismatchError) as caught:
        transport().all_reduce(torch.ones(8 + rank), "sum")
    return str(caught.value)


def test_of_unequal_sizes_it_is_said_what_to_change(pools):
    first, _ = pools(2).run(of_other_sizes)
    assert first == (
        "all_reduce of 8 float32 on rank 0 of the group meets all_reduce of 9 float32 on rank 1; give tensors of one "
        "size, and of rows as many on each rank"
    )


def late(rank):
    shared = transport(timeout=timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"barrier: rank 1 of the group has not come within 0.2 s"):
            shared.barrier()
    dist.barrier()
    shared.close()


def test_a_rank_that_does_not_come_ends_the_wait(pools):
    pools(2).run(late)


def open_files(rank):
    """Unix sockets and mappings of shared buffers, after a mesh and the next; mappings with a mesh."""
    counts = []
    for step in range(4):
        with Mesh({"data": 2}) as mesh:
            mesh.data.all_reduce(torch.ones(4)).wait()
            inside = _mappings()
        Mesh({"data": 2}).close()  # the next mesh ends what the last one used
        gc.collect()
        if step:
            counts.append((len(psutil.Process().net_connections("unix")), _mappings(), inside))
    return counts


def _mappings():
    return Path("/proc/self/maps").read_text().count("memfd:shardlab")


def test_closed_meshes_leave_nothing_open(pools):
    for counts in pools(2).run(open_files):
        assert len(set(counts)) == 1, counts
        _, after, inside = counts[0]
        assert after <= inside <= 2 * 2
