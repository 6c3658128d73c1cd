"""When a collective of torch's own groups began and ended: ``HostTimes`` for gloo, the others for NCCL.

``StreamTimes`` waits for the work itself, so it is for callers that get a ``Work`` of ours. ``FutureTimes`` leaves the
caller's ``Work`` alone.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from math import isnan
from time import perf_counter_ns
from typing import Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from shardlab.comm.events import CollectiveEvent, Observer

GLOO_THREADS = 2  # torch gives a gloo group two threads: a third collective waits until one of them is free


class Times(Protocol):
    """Finds out when each collective began and ended."""

    def follow(
        self, call: Callable[[], dist.Work], event: CollectiveEvent, observers: tuple[Observer, ...]
    ) -> dist.Work:
        """Issue it and follow it."""

    def ended(self, event: CollectiveEvent, observers: tuple[Observer, ...]) -> None:
        """The wait for it has returned."""


class HostTimes:
    """gloo: threads take collectives in the order of issue; each begins when it is issued or a thread becomes free.

    Args:
        num_threads: of the group.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_free = num_threads
        self._queued: deque[tuple[CollectiveEvent, tuple[Observer, ...]]] = deque()
        self._lock = threading.Lock()  # the end of a collective is told in gloo's thread

    def follow(
        self, call: Callable[[], dist.Work], event: CollectiveEvent, observers: tuple[Observer, ...]
    ) -> dist.Work:
        """Issue it; torch calls back at its end."""
        # Queued before the call: its end may be told before the call returns.
        with self._lock:
            self._queued.append((event, observers))
        self._begin_next()
        work = call()
        with contextlib.suppress(RuntimeError):  # gloo's reduce-scatter has no future: it ends when it is waited for
            work.get_future().add_done_callback(lambda _: self.ended(event, observers))
        return work

    def ended(self, event: CollectiveEvent, observers: tuple[Observer, ...]) -> None:
        """Its result is there; called by gloo's thread or, if that comes first, by whoever has waited."""
        with self._lock:
            if not isnan(event.end_ns):
                return
            event.end_ns = perf_counter_ns()
            self._num_free += 1
        for observer in observers:
            observer.completed(event)
        self._begin_next()

    def _begin_next(self) -> None:
        with self._lock:
            if not self._num_free or not self._queued:
                return
            # Under the lock, with its event: two ends told at the same time must not begin the same collective.
            self._num_free -= 1
            event, observers = self._queued.popleft()
        event.start_ns = perf_counter_ns()
        for observer in observers:
            observer.started(event)


class StreamTimes:
    """NCCL: a stream of ours that waits for the same work as NCCL's own has its events at the same times."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def follow(
        self, call: Callable[[], dist.Work], event: CollectiveEvent, observers: tuple[Observer, ...]
    ) -> dist.Work:
        """Issue it between two CUDA events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # NCCL's stream waits for the current one too, so both begin at the same moment.
        self._stream.wait_stream(torch.cuda.current_stream())
        begin.record(self._stream)
        work = call()
        self._record_end(work, end)
        event.device_times = (begin, end)
        for observer in observers:
            observer.started(event)
        return work

    def ended(self, event: CollectiveEvent, observers: tuple[Observer, ...]) -> None:
        """The current stream waits for it."""
        for observer in observers:
            observer.completed(event)

    def _record_end(self, work: dist.Work, end: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            work.wait()
            end.record()


class FutureTimes(StreamTimes):
    """NCCL: its future calls back, as soon as the work is enqueued, on a stream that waits for the end of the work."""

    @override
    def _record_end(self, work: dist.Work, end: torch.cuda.Event) -> None:
        work.get_future().add_done_callback(lambda _: end.record())
