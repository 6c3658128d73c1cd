"""When a collective of torch's own groups began and ended: ``HostTimes`` for gloo, the others for NCCL.

``StreamTimes`` waits for the work itself, so it is for callers that get a ``Work`` of ours. ``FutureTimes`` leaves the
caller's ``Work`` alone.

``EventWaits`` sees when the stream that computes waits for an event: so torch's engines wait, where nobody waits for a
work. FSDP2 gathers on a stream of its own, which records an event behind the collective; the stream that computes then
waits for this event. Both are methods of ``torch.cuda.Stream``; ``listen`` replaces them by ones that report each call.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from math import isnan
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardlab.comm.async_queues import Running
from shardlab.comm.events import CollectiveEvent, DeviceEvent, Observers
from shardlab.comm.streams import CUDA, DeviceStream, Streams, mark

T = TypeVar("T")
Call = Callable[[], dist.Work | None]
"""Has torch issue a collective."""
_GLOO_THREADS = 2  # torch gives a gloo group two threads: a third collective waits until one of them is free


class HostTimes:
    """gloo: threads take collectives in the order of issue; each begins when it is issued or a thread becomes free."""

    def __init__(self) -> None:
        self._num_free = _GLOO_THREADS
        self._queued: deque[tuple[CollectiveEvent, Observers]] = deque()
        self._lock = threading.Lock()  # the end of a collective is told in gloo's thread

    def follow(self, call: Call, event: CollectiveEvent, observers: Observers) -> dist.Work | None:
        """Issue it; torch calls back at its end."""
        # Queued before the call: its end may be told before the call returns.
        with self._lock:
            self._queued.append((event, observers))
        self._begin_next()
        try:
            work = call()
        except BaseException:
            self.ended(event, observers)  # or it would count as under way for ever, and keep a thread
            raise
        if work is None:  # a group that has waited by itself
            self.ended(event, observers)
            return None
        with contextlib.suppress(RuntimeError):  # gloo's reduce-scatter has no future: it ends when it is waited for
            work.get_future().add_done_callback(lambda _: self.ended(event, observers))
        return work

    def wait(self, wait: Callable[[], T], event: CollectiveEvent) -> T:
        """The host waits."""
        return wait()

    def ended(self, event: CollectiveEvent, observers: Observers) -> None:
        """Its result is there; called by gloo's thread or, if that comes first, by whoever has waited."""
        with self._lock:
            if not isnan(event.end_ns):
                return
            event.end_ns = perf_counter_ns()
            self._num_free += 1
        # Outside the lock: observers have locks of their own.
        for observer in observers:
            observer.completed(event)
        self._begin_next()

    def close(self) -> None:
        """Nothing is left to do."""

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
    """NCCL: a stream of ours that waits for the same work as NCCL's own has its events at the same times.

    With ``async_op=False`` NCCL returns no work: it has run on the current stream, which so waits for it.

    Args:
        streams: CUDA's.
    """

    def __init__(self, streams: Streams = CUDA) -> None:
        self._streams = streams
        self._stream = streams.Stream()
        self._running = Running()
        self._waits = EventWaits(streams)
        self.close = listen(self._waits)

    def follow(self, call: Call, event: CollectiveEvent, observers: Observers) -> dist.Work | None:
        """Issue it between two CUDA events."""
        streams = self._streams
        # NCCL's stream waits for the current one too, so both begin at the same moment.
        self._stream.wait_stream(streams.current_stream())
        begin, end = streams.Event(enable_timing=True), streams.Event(enable_timing=True)
        here = event.device_issue = mark(streams)
        begin.record(self._stream)
        try:
            work = call()
        except BaseException:  # or it would count as under way for ever
            event.start_ns = event.end_ns = perf_counter_ns()
            for observer in observers:
                observer.completed(event)
            raise
        if work is None:
            end.record()
            event.device_times = (here, end)
            if self._computes_here():
                event.device_wait = event.device_times
            else:
                self._waits.issued(streams.current_stream(), event)
        else:
            event.device_times = (begin, end)
            self._record_end(work, end)
        self._running.add(event, observers)
        return work

    def wait(self, wait: Callable[[], T], event: CollectiveEvent) -> T:
        """Let the current stream wait for it."""
        before, result, after = mark(self._streams), wait(), mark(self._streams)
        if self._computes_here():
            event.device_wait = (before, after)
        return result

    def ended(self, event: CollectiveEvent, observers: Observers) -> None:
        """The current stream waits for it. The host does not, so only its end event knows whether it has ended."""
        self._running.tell_ended()

    def _computes_here(self) -> bool:
        return bool(self._streams.current_stream() == self._streams.default_stream())

    def _record_end(self, work: dist.Work, end: DeviceEvent) -> None:
        with self._streams.stream(self._stream):
            work.wait()
            end.record()


class FutureTimes(StreamTimes):
    """NCCL: its future calls back, as soon as the work is enqueued, on a stream that waits for the end of the work."""

    def _record_end(self, work: dist.Work, end: DeviceEvent) -> None:
        work.get_future().add_done_callback(lambda _: end.record())


Times = HostTimes | StreamTimes
"""Finds out when each collective began and ended."""


def complete_waits(left: Iterable[tuple[Times, CollectiveEvent, Observers]]) -> None:
    """Complete the events of collectives that C++ has waited for, in the order of issue.

    C++ begins to wait when it has nothing more to send, and waits for one after another. So a collective that had ended
    by then was not waited for.
    """
    waited = list(left)
    if not waited:
        return
    last = max((event for _, event, _ in waited), key=lambda event: event.issue_ns)
    now_ns: float = last.issue_ns
    for times, event, observers in waited:
        times.ended(event, observers)
        if event.device_times is not None:
            # The wait begins no earlier than the collective: before that the stream waited for the previous one.
            event.device_wait = None if last.device_issue is None else (last.device_issue, *event.device_times)
        elif event.end_ns > now_ns:
            event.wait_start_ns, event.wait_end_ns = now_ns, event.end_ns
            now_ns = event.end_ns
        for observer in observers:
            observer.waited(event)


_BEHIND = "_shardlab_behind"  # attribute of a device's event: the collectives before it, by who has seen them


class EventWaits:
    """Finds out when the stream that computes begins to wait for collectives of other streams.

    Args:
        streams: CUDA's.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._left: dict[DeviceStream, list[CollectiveEvent]] = {}  # by stream, those whose wait was not seen

    def issued(self, stream: DeviceStream, event: CollectiveEvent) -> None:
        """A stream beside the one that computes runs a collective, or has waited for another that does."""
        self._left[stream] = [one for one in self._left.get(stream, ()) if one.device_wait is None] + [event]

    def recorded(self, stream: DeviceStream, marker: DeviceEvent) -> None:
        """A stream has recorded an event behind all that it runs."""
        if stream in self._left:
            # At the marker itself, with which it goes: torch 2.11 frees events without telling weak references to them.
            vars(marker).setdefault(_BEHIND, {})[self] = self._left[stream]

    def waits(self, stream: DeviceStream, marker: DeviceEvent) -> None:
        """A stream is about to wait for an event."""
        behind = [event for event in vars(marker).get(_BEHIND, {}).get(self, ()) if event.device_wait is None]
        if not behind:
            return
        if stream != self._streams.default_stream():
            for event in behind:  # whoever waits for this stream waits for them too
                self.issued(stream, event)
            return
        before = self._streams.Event(enable_timing=True)
        before.record(stream)
        for event in behind:
            event.device_wait = (before, *(event.device_times or ()))


_listening: list[EventWaits] = []
_plain = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event


def listen(waits: EventWaits) -> Callable[[], None]:
    """Tell of the events that any CUDA stream records or waits for, until what this returns is called."""
    if not _listening:
        setattr(torch.cuda.Stream, "record_event", _record_event)  # noqa: B010  (as an assignment it has no type)
        setattr(torch.cuda.Stream, "wait_event", _wait_event)  # noqa: B010
    _listening.append(waits)

    def end() -> None:
        if waits in _listening:
            _listening.remove(waits)
        if not _listening:
            for name, plain in zip(("record_event", "wait_event"), _plain, strict=True):
                setattr(torch.cuda.Stream, name, plain)

    return end


def _record_event(stream: Any, event: Any = None) -> Any:
    marker = _plain[0](stream, event)
    for waits in _listening:
        waits.recorded(stream, marker)
    return marker


def _wait_event(stream: Any, event: Any) -> None:
    for waits in _listening:
        waits.waits(stream, event)
    _plain[1](stream, event)
