"""Small messages between two ranks of one host: written into a socket by one, read by the other when it waits.

No thread stands between them. What is sent lies in the kernel until it is read, and each message says when it was sent,
so that a receiver who comes later still knows since when it was there. Messages of one kind, a number that stands for
length and dtype, go to receives of that kind in their order.
"""

import contextlib
import socket
import struct
import threading
from collections import defaultdict, deque
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any

from torch import Tensor

from shardlab.comm.transports.base import Job

MOST_BYTES = 64 * 1024
_HEAD = struct.Struct("=QQ")  # number, nanoseconds of ``perf_counter_ns``, which is one clock for all ranks of a host
_SEND_BUFFER_BYTES = 8 * MOST_BYTES


class Expected:
    """A receive that has been posted; see ``base.Arrival``."""

    def __init__(self, owner: "SmallMessages", memory: memoryview) -> None:
        self.memory, self.sent_ns, self._owner = memory, 0, owner

    def wait(self) -> float:
        """Read until it has come."""
        with self._owner.reads:
            while not self.sent_ns:
                self._owner.read()
        return self.sent_ns

    def has_come(self) -> bool:
        """Read what is there, unless somebody else reads; that the other rank has gone is told to whoever waits."""
        if not self.sent_ns and self._owner.reads.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, RuntimeError):
                    while not self.sent_ns:
                        self._owner.read(socket.MSG_DONTWAIT)
            finally:
                self._owner.reads.release()
        return bool(self.sent_ns)


class SmallMessages:
    """Those to and from one other rank.

    Args:
        peer: a connected socket that keeps messages apart (SOCK_SEQPACKET), for these alone.
        rank: the other's position in the group.
        timeout: how long a rank waits for the other.
    """

    def __init__(self, peer: socket.socket, rank: int, timeout: timedelta) -> None:
        self.reads = threading.Lock()
        self._peer, self._rank, self._timeout_s = peer, rank, timeout.total_seconds()
        self._room = bytearray(_HEAD.size + MOST_BYTES)
        self._expected: defaultdict[int, deque[Expected]] = defaultdict(deque)  # by number, and those below likewise
        self._early: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._waiting: deque[int] = deque()  # sends that wait for room, which none may overtake
        # By the kernel: a socket of Python's with a timeout would be asked before each message whether it is ready.
        peer.settimeout(None)
        seconds, micros = divmod(max(1, round(self._timeout_s * 1e6)), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, micros))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def start_send(self, number: int, tensor: Tensor) -> Job | None:
        """Send now, if there is room; else what waits for it.

        Args:
            number: by which messages are matched.
            tensor: bytes, flat.
        """
        if not self._waiting:
            with contextlib.suppress(BlockingIOError):
                self.send(number, tensor, socket.MSG_DONTWAIT)
                return None
        self._waiting.append(number)
        return partial(self._send_late, number, tensor)

    def send(self, number: int, tensor: Tensor, flags: int = 0) -> None:
        """Send; waits for room unless the flags say otherwise."""
        try:
            self._peer.sendmsg([_HEAD.pack(number, perf_counter_ns()), _memory_of(tensor)], (), flags)
        except BlockingIOError as error:
            if flags:
                raise  # and not from itself: such a cycle would hold the memory
            raise self._late() from error
        except OSError as error:
            raise self._gone() from error

    def _send_late(self, number: int, tensor: Tensor) -> None:
        try:
            self.send(number, tensor)
        finally:
            self._waiting.popleft()

    def expect(self, number: int, tensor: Tensor) -> Expected:
        """Post a receive into a tensor of bytes, flat."""
        expected = Expected(self, _memory_of(tensor))
        with self.reads:
            self._expected[number].append(expected)
            if self._early[number]:
                self._give(number, self._early[number].popleft())
        return expected

    def read(self, flags: int = 0) -> None:
        """Read one message, for whichever receive it is; ``reads`` is held."""
        try:
            size = self._peer.recv_into(self._room, 0, flags)
        except BlockingIOError as error:
            if flags:
                raise  # and not from itself: such a cycle would hold the memory
            raise self._late() from error
        except OSError as error:
            raise self._gone() from error
        if not size:
            raise self._gone()
        number, _ = _HEAD.unpack_from(self._room)
        message = memoryview(self._room)[:size]
        if self._expected[number]:
            self._give(number, message)
        else:
            self._early[number].append(bytes(message))

    def _give(self, number: int, message: bytes | memoryview) -> None:
        expected = self._expected[number].popleft()
        expected.memory[:] = memoryview(message)[_HEAD.size :]
        _, expected.sent_ns = _HEAD.unpack_from(message)

    def _late(self) -> RuntimeError:
        return RuntimeError(f"message: rank {self._rank} of the group has not come within {self._timeout_s:g} s")

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"message: Connection closed by peer: rank {self._rank} of the group has gone")


def _memory_of(tensor: Tensor) -> memoryview:
    memory: Any = tensor.numpy()  # which is a buffer for Python 3.11 too, though only later ones have a type for it
    return memoryview(memory)
