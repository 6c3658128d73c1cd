"""How ranks of one host come to share memory: sockets between each two of them, through which they pass descriptors.

Two more for each two of them are for letters, one for each way (``letters``).

The memory has no name (``memfd_create``), and the Unix sockets are in the kernel's abstract namespace: whatever ends a
process, nothing stays behind. Any process of the host may connect to such a socket. So a rank takes a connection only
from a process of its own user, by the kernel's word (``SO_PEERCRED``), that signs its hello with the ranks' secret
(``comm.signed_messages``). What ranks tell each other over their group, where another user may listen, is no secret.

Two hosts may look like one: a cloned virtual machine has the same boot id. Then a rank cannot be reached under its
address, and all ranks of the group use gloo instead.
"""

import contextlib
import hmac
import json
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardlab.comm.signed_messages import all_gather_bytes, signature
from shardlab.comm.transports.shared_memory import SharedBuffers, close_all

HALF_BYTES = 2 * 1024**2  # of a buffer: smaller ones synchronise more often, larger ones leave the cache
_HELLO = struct.Struct("=I32s")  # rank in the group, its signature for this listener
_CREDENTIALS = struct.Struct("=iII")  # process, user and group, as the kernel gives them
_BACKLOG = 128  # of connections: room for some that do not belong here
_Memory = dict[int, mmap.mmap]
_Letters = dict[int, tuple[socket.socket, socket.socket]]
_HELLO_S = 5.0  # a stranger may connect and say nothing


class _Endpoint(NamedTuple):
    """Where a rank can be reached, and by whom: only processes of the same ``host`` can share memory with it."""

    host: str
    address: str

    def hello(self, rank: int) -> bytes:
        """What the rank of the group that connects here says first."""
        return _HELLO.pack(rank, signature(f"rank {rank} connects to {self.address}"))


def share_buffers(group: dist.ProcessGroup, timeout: timedelta, half_bytes: int = HALF_BYTES) -> SharedBuffers | None:
    """Buffers for a gloo group; every rank of it calls this.

    Args:
        group: this process is a member of it.
        timeout: how long a rank waits for the others.
        half_bytes: size of each half, a multiple of 16, the same on all ranks.

    Returns:
        None, on all ranks, where some are on different hosts or the system has no such memory.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    with contextlib.ExitStack() as stack:
        listener, own = _listen()
        if listener is not None:
            stack.enter_context(listener)
        # Also by a rank without shared memory: the others wait for its answer, and all must decide alike.
        endpoints = [_Endpoint(*json.loads(told)) for told in all_gather_bytes(json.dumps(own).encode(), group)]
        if listener is None or len({endpoint.host for endpoint in endpoints}) > 1:
            return None
        sockets = _connected(rank, endpoints)
        # Before anybody accepts: a rank would wait for a connection that another could not make.
        missing = torch.tensor([int(sockets is None)], device="cpu")  # whatever a script has set as default
        dist.all_reduce(missing, group=group)
        if missing.item():
            close_all((sockets or {}).values())
            return None
        assert sockets is not None
        listener.settimeout(timeout.total_seconds())
        sockets = dict(sorted({**sockets, **_accepted(rank, listener, own, num_ranks)}.items()))
    memory, letters = _exchange(rank, sockets, 2 * half_bytes)
    return SharedBuffers(rank, memory, sockets, letters, timeout)


def _listen() -> tuple[socket.socket | None, _Endpoint]:
    """A listening socket and its endpoint; without shared memory None, and a host name that no other rank has."""
    try:
        host = _host()
    except OSError:
        return None, _Endpoint(uuid.uuid4().hex, "")
    endpoint = _Endpoint(host, f"\0shardlab-{uuid.uuid4().hex}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(endpoint.address)
    listener.listen(_BACKLOG)
    return listener, endpoint


def _host() -> str:
    """Equal for two processes that can share memory: one Linux kernel, one network namespace."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {Path('/proc/self/ns/net').readlink()}"


def _connected(rank: int, endpoints: list[_Endpoint]) -> dict[int, socket.socket] | None:
    """A socket to every rank before this one; None if one of them is not there after all."""
    sockets: dict[int, socket.socket] = {}
    # Every listener exists by now, so connecting never waits for the other rank to accept.
    for other in range(rank):
        sockets[other] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(_HELLO_S)
        try:
            peer.connect(endpoints[other].address)
            if not _is_own_user(peer):
                raise PermissionError(f"rank {other} belongs to another user")
            peer.send(endpoints[other].hello(rank))
        except OSError:
            close_all(sockets.values())
            return None
    return sockets


def _accepted(rank: int, listener: socket.socket, own: _Endpoint, num_ranks: int) -> dict[int, socket.socket]:
    """A socket to every rank after this one; all of them have connected. Whoever else has is turned away."""
    sockets: dict[int, socket.socket] = {}
    while len(sockets) < num_ranks - 1 - rank:
        peer, _ = listener.accept()
        other = _rank_of(peer, own)
        if other is None:
            peer.close()
        else:
            sockets[other] = peer
    return sockets


def _rank_of(peer: socket.socket, own: _Endpoint) -> int | None:
    """The rank that has connected; None for anybody else."""
    if not _is_own_user(peer):
        return None
    peer.settimeout(_HELLO_S)
    try:
        hello = peer.recv(_HELLO.size)
        other = int(_HELLO.unpack(hello)[0])
    except (OSError, struct.error):  # nothing is said, or something of another length
        return None
    return other if hmac.compare_digest(hello, own.hello(other)) else None


def _is_own_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _exchange(rank: int, sockets: Mapping[int, socket.socket], num_bytes: int) -> tuple[_Memory, _Letters]:
    """Make this rank's buffer and sockets for its letters, pass their descriptors to all others and take theirs."""
    buffers, letters, outgoing = {}, {}, {}
    own = os.memfd_create("shardlab", os.MFD_CLOEXEC)
    os.ftruncate(own, num_bytes)
    # All sends before any receive: otherwise each rank's wait would come on top of the last one's.
    for other, peer in sockets.items():
        peer.settimeout(None)
        outgoing[other], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(peer, [b"buffer"], [own, theirs.fileno()])
    for other, peer in sockets.items():
        _, received, _, _ = socket.recv_fds(peer, len(b"buffer"), 2, socket.MSG_CMSG_CLOEXEC)
        if not received:
            os.close(own)
            raise RuntimeError(f"shared memory: rank {other} of the group has gone while ranks exchanged their buffers")
        buffers[other] = _mapped(received[0], num_bytes)
        letters[other] = outgoing[other], socket.socket(fileno=received[1])
    # After the sends: mapping closes the descriptor that they pass on.
    buffers[rank] = _mapped(own, num_bytes)
    return buffers, letters


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)  # the mapping keeps the memory; a descriptor kept as well would leak with each mesh
