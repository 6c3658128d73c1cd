"""Memory that the ranks of one host share: an area a rank writes and all others read, and a bell between each two.

    areas.own(dtype)[:n].copy_(x)      # write what the others shall have
    areas.meet(call)                   # ring, and wait until all have rung
    areas.of(rank, dtype)[:n]          # what they have written; until the next meeting

An area has two halves, which take turns. A rank writes into a half again two meetings later, and between the two every
other rank has rung once more: it has come back from its reading, so nothing is overwritten that somebody still reads.

The memory has no name (``memfd_create``) and the bells are Unix sockets in the kernel's abstract namespace: whatever
ends a process, nothing stays behind. A bell says which collective its rank is in, so ranks that meet in two different
ones get an error and not each other's numbers.
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

HALF_BYTES = 2 * 1024**2  # of an area: less costs meetings, more leaves the cache
_BELL = struct.Struct("=16sQ16sI96s")  # the last is cut off, so a number of the whole stands before it
_RANK = struct.Struct("=I")


@dataclass(frozen=True)
class _Door:
    """Where a rank can be reached, and by whom: only processes of the same ``host`` can share memory with it."""

    host: str
    address: str


class Call(NamedTuple):
    """What a rank is in: the same on all ranks that meet."""

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
        return _BELL.pack(self.collective.encode(), self.numel, self.dtype.encode(), zlib.crc32(tag), tag)

    @classmethod
    def unpacked(cls, message: bytes) -> "Call":
        """What another rank has sent, perhaps with a shorter tag."""
        collective, numel, dtype, _, tag = _BELL.unpack(message)
        name, kind, purpose = (text.rstrip(b"\0").decode(errors="replace") for text in (collective, dtype, tag))
        return cls(name, numel, kind, purpose)

    def __str__(self) -> str:
        what = f"{self.collective} of {self.numel} {self.dtype}" if self.dtype else self.collective
        return f"{what} ({self.tag})" if self.tag else what


class MismatchError(RuntimeError):
    """Ranks met in different collectives."""


class SharedAreas:
    """All areas of a group, as one of its ranks sees them.

    Args:
        rank: this process's position in the group.
        memory: the areas by rank, all of one size.
        bells: a connected socket to every other rank.
        timeout: how long a meeting may last.
    """

    def __init__(
        self, rank: int, memory: Mapping[int, mmap.mmap], bells: Mapping[int, socket.socket], timeout: timedelta
    ) -> None:
        self.rank = rank
        self._memory, self._bells = dict(memory), dict(bells)
        self._timeout_s = timeout.total_seconds()
        self._half = 0  # the one that this rank writes
        self._half_bytes = len(memory[rank]) // 2
        for bell in self._bells.values():
            bell.settimeout(self._timeout_s)

    def length(self, dtype: torch.dtype) -> int:
        """Elements that one meeting can carry from each rank."""
        return self._half_bytes // dtype.itemsize

    def own(self, dtype: torch.dtype) -> Tensor:
        """Where this rank writes for the next meeting, [length]."""
        return self._view(self.rank, dtype, self._half)

    def of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """What a rank has written for the last meeting, [length]; something older where it has written less."""
        return self._view(rank, dtype, 1 - self._half)

    def meet(self, call: Call) -> None:
        """Return when all ranks have come here; then ``of`` is what they had written before.

        Raises:
            MismatchError: another rank is in something else.
            RuntimeError: one has gone, or does not come within the timeout.
        """
        message = call.packed()
        for rank, bell in self._bells.items():
            try:
                bell.send(message)
            except OSError as error:
                raise _gone(rank, call) from error
        for rank, bell in self._bells.items():
            theirs = self._heard(rank, bell, call)
            if theirs != message:
                other = Call.unpacked(theirs)
                raise MismatchError(f"{call} on rank {self.rank} of the group meets {other} on rank {rank}")
        self._half = 1 - self._half

    def close(self) -> None:
        """Let go of everything; whoever still waits for this rank gets an error."""
        for bell in self._bells.values():
            bell.close()
        self._memory.clear()  # unmapped with the last tensor that looks at it

    def _heard(self, rank: int, bell: socket.socket, call: Call) -> bytes:
        try:
            message = bell.recv(_BELL.size)
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


def share_areas(group: dist.ProcessGroup, timeout: timedelta, half_bytes: int = HALF_BYTES) -> SharedAreas | None:
    """Areas for a gloo group; every rank of it calls this.

    Args:
        group: this process is a member of it.
        timeout: how long a meeting may last.
        half_bytes: size of each half, a multiple of 16, the same on all ranks.

    Returns:
        None, on all ranks, where some are on different hosts or the system has no such memory.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    with contextlib.ExitStack() as stack:
        listener, own = _open_door(num_ranks)
        if listener is not None:
            stack.enter_context(listener)
        doors: list[_Door] = [own] * num_ranks
        dist.all_gather_object(doors, own, group=group)
        if listener is None or len({door.host for door in doors}) > 1:
            return None
        listener.settimeout(timeout.total_seconds())
        bells = _connect(rank, listener, doors)
    return SharedAreas(rank, _exchange_areas(rank, bells, 2 * half_bytes), bells, timeout)


def _open_door(num_ranks: int) -> tuple[socket.socket | None, _Door]:
    """A socket that listens, and where; None and a host that is nobody else's where there is no such memory."""
    try:
        host = _host()
    except OSError:
        return None, _Door(uuid.uuid4().hex, "")
    door = _Door(host, f"\0shardlab-{uuid.uuid4().hex}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(door.address)
    listener.listen(num_ranks)
    return listener, door


def _host() -> str:
    """The same for two processes that can share memory so: one Linux kernel, one network namespace."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {Path('/proc/self/ns/net').readlink()}"


def _connect(rank: int, listener: socket.socket, doors: list[_Door]) -> dict[int, socket.socket]:
    """A socket to every other rank: each knocks at the doors of the ranks before it."""
    bells = {}
    for other in range(rank):
        bells[other] = bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bell.connect(doors[other].address)
        bell.send(_RANK.pack(rank))
    while len(bells) < len(doors) - 1:
        bell, _ = listener.accept()
        (other,) = _RANK.unpack(bell.recv(_RANK.size))
        bells[other] = bell
    return dict(sorted(bells.items()))


def _exchange_areas(rank: int, bells: Mapping[int, socket.socket], num_bytes: int) -> dict[int, mmap.mmap]:
    """Make this rank's area, hand it to all others and take theirs."""
    areas = {}
    own = os.memfd_create("shardlab", os.MFD_CLOEXEC)
    os.ftruncate(own, num_bytes)
    for bell in bells.values():
        socket.send_fds(bell, [b"area"], [own])
    for other, bell in bells.items():
        _, [theirs], _, _ = socket.recv_fds(bell, len(b"area"), 1)
        areas[other] = _mapped(theirs, num_bytes)
    areas[rank] = _mapped(own, num_bytes)
    return areas


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _gone(rank: int, call: Call) -> RuntimeError:
    return RuntimeError(f"{call}: Connection closed by peer: rank {rank} of the group has gone")
