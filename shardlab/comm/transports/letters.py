"""Small messages between two ranks of a host, through sockets that only those look at who send and wait.

Through gloo a message wakes three threads, which share the cores with what computes. A letter wakes none: its sender
writes it, with the time, into a Unix socket, and its receiver reads it when it waits for it. When it begins to expect
one it writes that time back. A letter has come at the later of the two times, which both ranks know however late they
look: a send ends when its receiver is there, as over gloo, although nobody watches.
"""

import contextlib
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from threading import Thread
from time import perf_counter_ns

import torch
from torch import Tensor

from shardlab.comm.events import CollectiveEvent, Observers
from shardlab.comm.transports.base import Came, Job, Message, MismatchError
from shardlab.vocabulary import dtype_name

LARGEST_BYTES = 64 * 1024
"""Of a letter. The kernel has room for several of them, so that a writer seldom needs a thread that waits for it."""

_ROOM_BYTES = 16 * LARGEST_BYTES  # is asked for; a kernel may give less
_DTYPE_LENGTH = 16
_HEAD = struct.Struct(f"=QQ{_DTYPE_LENGTH}s")  # when it was written, its elements and their dtype
_EXPECTED = struct.Struct("=Q")  # since when


@dataclass(slots=True, eq=False)
class _Letter:
    """One under way; the times are 0 until they are known."""

    written_ns: int = 0
    expected_ns: int = 0

    @property
    def came_ns(self) -> int:
        return max(self.written_ns, self.expected_ns)


class _End:
    """One end of a pair of sockets, whose messages keep their borders, and come in order or not at all.

    Args:
        end: of the pair.
        other: the rank of the group that has the other end.
        timeout_s: how long a wait for it may last.
    """

    def __init__(self, end: socket.socket, other: int, timeout_s: float) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        self._end, self._other, self._timeout_s = end, other, timeout_s
        self._writer: Thread | None = None
        self.close = weakref.finalize(self, _close, end)

    def _write(self, write: Callable[[], object]) -> None:
        """Write now, or in a thread that waits for room: whoever sends must get on, to receive what others send."""
        if (self._writer is not None and self._writer.is_alive()) or not self._has_written(write):
            self._writer = Thread(target=self._write_later, args=(write, self._writer), daemon=True)
            self._writer.start()

    def _write_later(self, write: Callable[[], object], before: Thread | None) -> None:
        if before is not None:
            before.join()
        while not self._has_written(write):
            if not self._is_ready(select.POLLOUT):
                # What is written later would be taken for this one. Whoever waits, here or there, is told.
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
                return

    @staticmethod
    def _has_written(write: Callable[[], object]) -> bool:
        try:
            write()
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # the next read says that the other rank has gone
        return True

    def _read(self, waits: Job, *buffers: memoryview | bytearray) -> int:
        """Wait for a message; how long it is."""
        try:
            while True:
                try:
                    length, _, flags, _ = self._end.recvmsg_into(buffers)
                except BlockingIOError:
                    waits()
                    if not self._is_ready(select.POLLIN):
                        raise RuntimeError(
                            f"message: rank {self._other} of the group has not come within {self._timeout_s:g} s"
                        ) from None
                else:
                    break
        except OSError as error:
            raise self._gone() from error
        if not length:
            raise self._gone()
        return -1 if flags & socket.MSG_TRUNC else length

    def _is_ready(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(1000 * self._timeout_s))

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"message: Connection closed by peer: rank {self._other} of the group has gone")


class Outbox(_End):
    """Letters to another rank."""

    def __init__(self, end: socket.socket, other: int, timeout_s: float) -> None:
        super().__init__(end, other, timeout_s)
        self._unexpected: deque[_Letter] = deque()  # as far as this rank knows

    def send(self, tensor: Tensor) -> Came:
        """Write a flat tensor, which must not change before the returned call has waited."""
        self._unexpected.append(letter := _Letter())

        def write() -> None:
            now_ns = perf_counter_ns()
            self._end.sendmsg((_HEAD.pack(now_ns, *_kind(tensor)), _bytes(tensor)))
            letter.written_ns = now_ns

        self._write(write)
        return partial(self._wait, letter)

    def _wait(self, letter: _Letter, waits: Job) -> int:
        since = bytearray(_EXPECTED.size)
        while not letter.expected_ns:
            self._read(waits, since)
            (self._unexpected.popleft().expected_ns,) = _EXPECTED.unpack(since)
        if not letter.written_ns and self._writer is not None:
            self._writer.join()
            if not letter.written_ns:
                raise self._gone()
        return letter.came_ns


class Inbox(_End):
    """Letters from another rank."""

    def __init__(self, end: socket.socket, other: int, timeout_s: float) -> None:
        super().__init__(end, other, timeout_s)
        self._unread: deque[tuple[_Letter, Tensor]] = deque()

    def expect(self, tensor: Tensor) -> Came:
        """Take the next letter into a flat tensor, whose elements are there when the returned call has waited."""
        letter = _Letter(expected_ns=perf_counter_ns())
        self._unread.append((letter, tensor))
        self._write(partial(self._end.send, _EXPECTED.pack(letter.expected_ns)))
        return partial(self._wait, letter)

    def _wait(self, letter: _Letter, waits: Job) -> int:
        head = bytearray(_HEAD.size)
        while not letter.written_ns:  # those before it come first
            first, tensor = self._unread[0]
            is_whole = self._read(waits, head, _bytes(tensor)) == _HEAD.size + tensor.nbytes
            written_ns, *kind = _HEAD.unpack(head)
            if not is_whole or kind != _kind(tensor):
                theirs = f"{kind[0]} {kind[1].rstrip(bytes(1)).decode()}"
                raise MismatchError(
                    f"recv of {tensor.numel()} {dtype_name(tensor.dtype)} meets send of {theirs} on rank {self._other} "
                    "of the group"
                )
            self._unread.popleft()
            first.written_ns = written_ns
        return letter.came_ns


def awaited(came: Came, message: Message, event: CollectiveEvent, observers: Observers) -> Job:
    """The wait for a letter: observers are told where this rank has to wait for it, and that it has come."""
    event.start_ns = event.issue_ns

    def waits() -> None:
        event.wait_start_ns = perf_counter_ns()
        for observer in observers:
            observer.started(event)

    def wait() -> None:
        event.end_ns = came(waits)
        if message.after is not None:
            with torch.inference_mode():  # as a queue's thread does
                message.after()
        for observer in observers:
            observer.completed(event)

    return wait


def _kind(tensor: Tensor) -> list[int | bytes]:
    return [tensor.numel(), _packed(tensor.dtype)]


@cache
def _packed(dtype: torch.dtype) -> bytes:
    return dtype_name(dtype).encode().ljust(_DTYPE_LENGTH, b"\0")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # whoever waits here or there gets up
    end.close()
