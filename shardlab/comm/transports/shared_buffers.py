"""Memory that the ranks of one host share: each rank writes a buffer of its own, and all others read it.

    buffers.own(dtype)[:n].copy_(x)      # write what the others shall read
    buffers.synchronize(call)            # wait until all ranks have come here
    buffers.of(rank, dtype)[:n]          # what they wrote; valid until the next synchronize

Each buffer is double: a rank writes the two halves in turn. It writes into a half again two synchronisations later, and
in between every other rank has sent one more message, which it does only after its reading: nothing is overwritten that
somebody still reads.

The memory has no name (``memfd_create``), and the Unix sockets between each two ranks are in the kernel's abstract
namespace: whatever ends a process, nothing stays behind. A message says which collective its rank is in, so ranks in
two different ones get an error and not each other's numbers.
"""

import contextlib
import mmap
import os
import socket
import struct
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.vocabulary import Collective, dtype_name

HALF_BYTES = 2 * 1024**2  # of a buffer: smaller ones synchronise more often, larger ones leave the cache
_MESSAGE = struct.Struct("=16sQ16sI96s")  # the last is cut off, so a number of the whole stands before it
_RANK = struct.Struct("=I")


@dataclass(frozen=True)
class _Endpoint:
    """Where a rank can be reached, and by whom: only processes of the same ``host`` can share memory with it."""

    host: str
    address: str


class Call(NamedTuple):
    """The collective a rank is in; it must be the same on all ranks that synchronise."""

    collective: str
    numel: int
    dtype: str
    tag: str

    @classmethod
    def of(cls, collective: Collective, buffer: Tensor, tag: str) -> "Call":
        """The collective of a whole buffer."""
        return cls(str(collective), buffer.numel(), dtype_name(buffer.dtype), tag)

    def packed(self) -> bytes:
        """As it is sent."""
        tag = self.tag.encode()
        return _MESSAGE.pack(self.collective.encode(), self.numel, self.dtype.encode(), zlib.crc32(tag), tag)

    @classmethod
    def unpacked(cls, message: bytes) -> "Call":
        """Another rank's message; a long tag comes back cut off."""
        collective, numel, dtype, _, tag = _MESSAGE.unpack(message)
        name, kind, purpose = (text.rstrip(b"\0").decode(errors="replace") for text in (collective, dtype, tag))
        return cls(name, numel, kind, purpose)

    def __str__(self) -> str:
        what = f"{self.collective} of {self.numel} {self.dtype}" if self.dtype else self.collective
        return f"{what} ({self.tag})" if self.tag else what


class MismatchError(RuntimeError):
    """Ranks are in different collectives."""


class SharedBuffers:
    """All shared buffers of a group, as one of its ranks sees them.

    Args:
        rank: this process's position in the group.
        memory: the buffers by rank, all of one size.
        sockets: a connected socket to every other rank.
        timeout: how long a rank waits for the others.
    """

    def __init__(
        self, rank: int, memory: Mapping[int, mmap.mmap], sockets: Mapping[int, socket.socket], timeout: timedelta
    ) -> None:
        self.rank = rank
        self._memory, self._sockets = dict(memory), dict(sockets)
        self._timeout_s = timeout.total_seconds()
        self._half = 0  # the one that this rank writes
        self._mismatch = ""  # what has met; from then on nobody can say who is where
        self._half_bytes = len(memory[rank]) // 2
        for peer in self._sockets.values():
            peer.settimeout(self._timeout_s)

    def length(self, dtype: torch.dtype) -> int:
        """Elements that one half of a buffer holds."""
        return self._half_bytes // dtype.itemsize

    def own(self, dtype: torch.dtype) -> Tensor:
        """Where this rank writes before the next ``synchronize``, [length]."""
        return self._view(self.rank, dtype, self._half)

    def of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """What a rank wrote before the last ``synchronize``, [length]; something older where it has written less."""
        return self._view(rank, dtype, 1 - self._half)

    def synchronize(self, call: Call) -> None:
        """Return when all ranks have come here; then ``of`` is what they had written before.

        Raises:
            MismatchError: another rank is in something else, or was before.
            RuntimeError: one has ended, or does not come within the timeout.
        """
        # Before anything is sent: all ranks have this error, so nobody would answer, and cleaning up would hang.
        if self._mismatch:
            raise MismatchError(self._mismatch)
        message = call.packed()
        # All sends before any receive: otherwise each rank's wait would come on top of the last one's.
        for rank, peer in self._sockets.items():
            try:
                peer.send(message)
            except OSError as error:
                raise _gone(rank, call) from error
        for rank, peer in self._sockets.items():
            theirs = self._receive(rank, peer, call)
            if theirs != message:
                other = Call.unpacked(theirs)
                self._mismatch = f"{call} on rank {self.rank} of the group meets {other} on rank {rank}"
                raise MismatchError(self._mismatch)
        # Every rank read the other half before it sent the message that has come: it may be overwritten now.
        self._half = 1 - self._half

    def close(self) -> None:
        """Close the sockets and the memory; whoever still waits for this rank gets an error."""
        for peer in self._sockets.values():
            peer.close()
        self._memory.clear()  # a tensor that views it keeps it mapped

    def _receive(self, rank: int, peer: socket.socket, call: Call) -> bytes:
        try:
            message = peer.recv(_MESSAGE.size)
        except TimeoutError as error:
            late = f"{call}: rank {rank} of the group has not come within {self._timeout_s:g} s"
            raise RuntimeError(late) from error
        except OSError as error:
            raise _gone(rank, call) from error
        if not message:
            raise _gone(rank, call)
        return message

    def _view(self, rank: int, dtype: torch.dtype, half: int) -> Tensor:
        offset = half * self._half_bytes
        return torch.frombuffer(self._memory[rank], dtype=dtype, count=self.length(dtype), offset=offset)


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
        listener, own = _listen(num_ranks)
        if listener is not None:
            stack.enter_context(listener)
        endpoints: list[_Endpoint] = [own] * num_ranks
        # Also by a rank without shared memory: the others wait for its answer, and all must decide alike.
        dist.all_gather_object(endpoints, own, group=group)
        if listener is None or len({endpoint.host for endpoint in endpoints}) > 1:
            return None
        listener.settimeout(timeout.total_seconds())
        sockets = _connect(rank, listener, endpoints)
    return SharedBuffers(rank, _exchange_buffers(rank, sockets, 2 * half_bytes), sockets, timeout)


def _listen(num_ranks: int) -> tuple[socket.socket | None, _Endpoint]:
    """A listening socket and its endpoint; without shared memory None, and a host name that no other rank has."""
    try:
        host = _host()
    except OSError:
        return None, _Endpoint(uuid.uuid4().hex, "")
    endpoint = _Endpoint(host, f"\0shardlab-{uuid.uuid4().hex}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(endpoint.address)
    listener.listen(num_ranks)
    return listener, endpoint


def _host() -> str:
    """Equal for two processes that can share memory: one Linux kernel, one network namespace."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {Path('/proc/self/ns/net').readlink()}"


def _connect(rank: int, listener: socket.socket, endpoints: list[_Endpoint]) -> dict[int, socket.socket]:
    """A socket to every other rank: each rank connects to those before it and accepts those after it."""
    sockets = {}
    # Every listener exists by now, so connecting never waits for the other rank to accept.
    for other in range(rank):
        sockets[other] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(endpoints[other].address)
        peer.send(_RANK.pack(rank))
    while len(sockets) < len(endpoints) - 1:
        peer, _ = listener.accept()
        (other,) = _RANK.unpack(peer.recv(_RANK.size))
        sockets[other] = peer
    return dict(sorted(sockets.items()))


def _exchange_buffers(rank: int, sockets: Mapping[int, socket.socket], num_bytes: int) -> dict[int, mmap.mmap]:
    """Make this rank's buffer, pass its descriptor to all others and map theirs."""
    buffers = {}
    own = os.memfd_create("shardlab", os.MFD_CLOEXEC)
    os.ftruncate(own, num_bytes)
    # All sends before any receive: otherwise each rank's wait would come on top of the last one's.
    for peer in sockets.values():
        socket.send_fds(peer, [b"buffer"], [own])
    for other, peer in sockets.items():
        _, [theirs], _, _ = socket.recv_fds(peer, len(b"buffer"), 1)
        buffers[other] = _mapped(theirs, num_bytes)
    buffers[rank] = _mapped(own, num_bytes)
    return buffers


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)  # the mapping keeps the memory; a descriptor kept as well would leak with each mesh


def _gone(rank: int, call: Call) -> RuntimeError:
    return RuntimeError(f"{call}: Connection closed by peer: rank {rank} of the group has gone")
