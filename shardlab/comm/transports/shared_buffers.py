"""Memory that the ranks of one host share: each rank writes a buffer of its own, and all others read it.

    buffers.own(dtype)[:n].copy_(x)      # write what the others shall read
    buffers.synchronize(call)            # wait until all ranks have come here
    buffers.of(rank, dtype)[:n]          # what they wrote; valid until the next synchronize

Each buffer is double: a rank writes the two halves in turn. It writes into a half again two synchronisations later, and
in between every other rank has sent one more message, which it does only after its reading: nothing is overwritten that
somebody still reads.

Memory and sockets come from ``rendezvous``. A message says which collective its rank is in, so ranks in two different
ones get an error and not each other's numbers.
"""

import mmap
import socket
import struct
import weakref
import zlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.comm.transports.base import MismatchError
from shardlab.vocabulary import Collective, dtype_name

_MESSAGE = struct.Struct("=16sQ16sI96s")  # the last is cut off, so a number of the whole stands before it


class Call(NamedTuple):
    """The collective a rank is in; it must be the same on all ranks that synchronise."""

    collective: str
    numel: int
    dtype: str
    tag: str
    how: object = ""  # reduction, bounds or root: told to no other rank, but part of the number of the whole

    @classmethod
    def of(cls, collective: Collective, buffer: Tensor, tag: str, how: object = "") -> "Call":
        """The collective of a whole buffer."""
        return cls(str(collective), buffer.numel(), dtype_name(buffer.dtype), tag, how)

    def packed(self) -> bytes:
        """As it is sent."""
        number = zlib.crc32(f"{self.tag} {self.how}".encode())
        return _MESSAGE.pack(self.collective.encode(), self.numel, self.dtype.encode(), number, self.tag.encode())

    @classmethod
    def unpacked(cls, message: bytes) -> "Call":
        """Another rank's message; a long tag comes back cut off."""
        collective, numel, dtype, _, tag = _MESSAGE.unpack(message)
        name, kind, purpose = (text.rstrip(b"\0").decode(errors="replace") for text in (collective, dtype, tag))
        return cls(name, numel, kind, purpose)

    def __str__(self) -> str:
        what = f"{self.collective} of {self.numel} {self.dtype}" if self.dtype else self.collective
        return f"{what} ({self.tag})" if self.tag else what


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
        # Also where nobody closes them: a rank ends, or an engine is dropped after an error.
        self._end = weakref.finalize(self, close_all, tuple(self._sockets.values()))

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
                if str(other) == str(call):
                    self._mismatch += ", with another reduction, other bounds, another root or end of the tag"
                raise MismatchError(self._mismatch)
        # Every rank read the other half before it sent the message that has come: it may be overwritten now.
        self._half = 1 - self._half

    def close(self) -> None:
        """Close the sockets and the memory; whoever still waits for this rank gets an error."""
        self._end()
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


def _gone(rank: int, call: Call) -> RuntimeError:
    return RuntimeError(f"{call}: Connection closed by peer: rank {rank} of the group has gone")


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close each."""
    for each in sockets:
        each.close()
