"""Ranks of one host on CPU tensors: what one rank writes into memory that all see, the others read.

    buffers.own(dtype)[:n].copy_(x)      # write what the others shall read
    buffers.synchronize(call)            # wait until all ranks have come here
    buffers.of(rank, dtype)[:n]          # what they wrote; valid until the next synchronize

Each rank writes a buffer of its own, which is double: it writes the two halves in turn. It writes into a half again two
synchronisations later, and in between every other rank has sent one more message, which it does only after its reading:
nothing is overwritten that somebody still reads. Memory and sockets come from ``rendezvous``. A message says which
collective its rank is in, so ranks in two different ones get an error and not each other's numbers.

All-reduce, reduce-scatter and all-gather work this way, in segments that stay in the cache. They move as many bytes as
a ring, but through no socket: about half of gloo's processor time, and a third to two thirds of its time. They sum as
``gloo`` does: in the order of the ranks, pair by pair. Small messages go by ``letters``; large ones, broadcasts and
all-to-all, which are rare, use gloo.
"""

import mmap
import socket
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.transports.base import Bounds, Came, Message, MismatchError, Reduction
from shardlab.comm.transports.gloo import GlooTransport, add_in_order
from shardlab.comm.transports.letters import LARGEST_BYTES, Inbox, Outbox
from shardlab.partition.uneven import chunk_bounds
from shardlab.vocabulary import Collective, HostTransport, dtype_name

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
        letters: sockets for letters to every other rank, and for those from there.
        timeout: how long a rank waits for the others.

    Attributes:
        outboxes: by rank; see ``letters``.
        inboxes: likewise.
    """

    def __init__(
        self, rank: int, memory: Mapping[int, mmap.mmap], sockets: Mapping[int, socket.socket],
        letters: Mapping[int, tuple[socket.socket, socket.socket]], timeout: timedelta,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._memory, self._sockets = dict(memory), dict(sockets)
        self._timeout_s = timeout.total_seconds()
        self._half = 0  # the one that this rank writes
        self.outboxes = {other: Outbox(one, other, self._timeout_s) for other, (one, _) in letters.items()}
        self.inboxes = {other: Inbox(one, other, self._timeout_s) for other, (_, one) in letters.items()}
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
                elif str(other._replace(numel=call.numel)) == str(call):
                    self._mismatch += "; give tensors of one size, and of rows as many on each rank"
                raise MismatchError(self._mismatch)
        # Every rank read the other half before it sent the message that has come: it may be overwritten now.
        self._half = 1 - self._half

    def close(self) -> None:
        """Close the sockets and the memory; whoever still waits for this rank gets an error."""
        self._end()
        for end in (*self.outboxes.values(), *self.inboxes.values()):
            end.close()
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


Add = Callable[..., Tensor]
_ADD: dict[Reduction, Add] = {"sum": torch.add, "max": torch.maximum}


class SharedMemoryTransport(GlooTransport):
    """Collectives through shared buffers.

    Args:
        group: a gloo process group, of which this process is a member.
        shared: the buffers of the same group.
    """

    name = HostTransport.SHARED_MEMORY

    def __init__(self, group: dist.ProcessGroup, shared: SharedBuffers) -> None:
        super().__init__(group)
        self._shared = shared

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Segment by segment: each rank reduces its part of it, then all gather the parts."""
        _require_addable(tensor.dtype)
        call = Call.of(Collective.ALL_REDUCE, tensor, tag, reduction)
        for segment in tensor.split(self._num_ranks * self._part_length(tensor.dtype)):
            bounds = chunk_bounds(segment.numel(), self._num_ranks)
            own = segment[bounds[self._rank] : bounds[self._rank + 1]]
            # No other rank needs this rank's term of its own part, so the sum may go over it.
            self._reduce_parts(call, own, segment, bounds, _ADD[reduction])
            self._gather_parts(call, segment, bounds)

    def start_of_sum(self, tensor: Tensor, reduction: Reduction) -> None:
        """Nothing: only the queue's thread can do it."""

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Segments of all chunks at once."""
        _require_addable(buffer.dtype)
        call = Call.of(Collective.REDUCE_SCATTER, buffer, tag, bounds)
        self._reduce_parts(call, output, buffer, bounds, torch.add)

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Segments of all chunks at once."""
        self._gather_parts(Call.of(Collective.ALL_GATHER, buffer, tag, bounds), buffer, bounds)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Over gloo, where ranks in different collectives wait; so they first compare what they are in."""
        self._shared.synchronize(Call.of(Collective.BROADCAST, tensor, "", src))
        super().broadcast(tensor, src)

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Over gloo, as a broadcast."""
        self._shared.synchronize(Call.of(Collective.ALL_TO_ALL, buffer, ""))
        super().all_to_all(output, buffer)

    def letter_of(self, message: Message) -> Callable[[], Came] | None:
        """Small ones go as letters, of whose size both ranks know."""
        if message.tensor.nbytes > LARGEST_BYTES:
            return None
        shared, peer = self._shared, message.peer
        return partial(shared.outboxes[peer].send if message.is_send else shared.inboxes[peer].expect, message.tensor)

    def barrier(self) -> None:
        """One synchronisation of the buffers."""
        self._shared.synchronize(Call(Collective.BARRIER, 0, "", ""))

    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:
        """The buffers are there once, for all collectives, outside of torch's memory."""
        return 0

    def close(self) -> None:
        """Close the shared buffers."""
        self._shared.close()

    def _part_length(self, dtype: torch.dtype) -> int:
        """Elements for each rank that fit into a half of a buffer."""
        return self._shared.length(dtype) // self._num_ranks

    def _reduce_parts(self, call: Call, output: Tensor, buffer: Tensor, bounds: Bounds, add: Add) -> None:
        """This rank's chunk, reduced, into ``output``, which may be that part of ``buffer``."""
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        length = self._part_length(buffer.dtype)
        # As many rounds on every rank, also where its own chunk is shorter: in each of them all ranks synchronise.
        for start in range(0, max(chunk.numel() for chunk in chunks), length):
            parts = [chunk[start : start + length] for chunk in chunks]
            place_of_all = self._shared.own(buffer.dtype)
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    place_of_all[rank * length : rank * length + part.numel()].copy_(part)
            # After it the others read what this rank wrote, and this rank writes the other half of its buffer.
            self._shared.synchronize(call)
            own = parts[self._rank]
            place = slice(self._rank * length, self._rank * length + own.numel())
            versions = [
                own if rank == self._rank else self._shared.of(rank, buffer.dtype)[place]
                for rank in range(self._num_ranks)
            ]
            # Another rank's memory: each rank sums at its own place, so nobody else reads what is overwritten here.
            room = versions[1 if self._rank == 0 else 0]
            add_in_order(versions, output[start : start + length], room, add)

    def _gather_parts(self, call: Call, buffer: Tensor, bounds: Bounds) -> None:
        """Every rank's chunk into its place."""
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        length = self._shared.length(buffer.dtype)
        # The longest chunk decides, on all ranks alike: each round is a synchronisation of all.
        for start in range(0, max(chunk.numel() for chunk in chunks), length):
            parts = [chunk[start : start + length] for chunk in chunks]
            own = parts[self._rank]
            self._shared.own(buffer.dtype)[: own.numel()].copy_(own)
            self._shared.synchronize(call)
            # Copied now: what the others wrote is valid only until the next synchronisation.
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(self._shared.of(rank, buffer.dtype)[: part.numel()])


def _require_addable(dtype: torch.dtype) -> None:
    """Checked on all ranks before any has written: a rank with nothing to add would wait for one that cannot add."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise RuntimeError(f"dtype: {dtype} cannot be added; reduce in bfloat16 or float32")
