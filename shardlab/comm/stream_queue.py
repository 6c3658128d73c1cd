"""Collectives beside the compute, by a CUDA stream, for transports whose calls only enqueue work (NCCL).

The queue is the stream, and two CUDA events are its clock. Whether a collective has ended its end event is asked, and
never waited for.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlab.comm.events import CollectiveEvent, DeviceEvent, Observers
from shardlab.comm.streams import CUDA, Streams, mark
from shardlab.comm.transports.base import Job, Message, Start


class Running:
    """Collectives that a stream has been given, in the order of issue, until their end has been told."""

    def __init__(self) -> None:
        self._entries: deque[tuple[CollectiveEvent, Observers]] = deque()

    def add(self, event: CollectiveEvent, observers: Observers) -> None:
        """One more; first those that have ended meanwhile are told."""
        self.tell_ended()
        self._entries.append((event, observers))
        for observer in observers:
            observer.started(event)

    def tell_ended(self) -> None:
        """Tell the observers what has ended; waits for nothing."""
        while self._entries and self._entries[0][0].has_ended_on_stream:
            event, observers = self._entries.popleft()
            for observer in observers:
                observer.completed(event)


@dataclass(frozen=True, eq=False)
class _Held:
    """A message that has been issued and has not left."""

    message: Message
    event: CollectiveEvent
    observers: Observers


class StreamQueue:
    """A CUDA stream beside the compute stream, for transports whose calls only enqueue (NCCL).

    Args:
        device: of the streams.
        streams: CUDA's.
    """

    def __init__(self, device: torch.device, streams: Streams = CUDA) -> None:
        self._streams = streams
        self._stream = streams.Stream(device)
        self._running = Running()
        self._held: list[_Held] = []

    def submit(self, job: Job, event: CollectiveEvent, observers: Observers, start: Start | None = None) -> Job:
        """Enqueue ``job`` behind everything that the current stream has been given so far; ``start`` is not needed."""
        # Before the collective: a rank may need a held message before it comes to the collective itself.
        self._let_travel(self._held)
        # The buffers are still being computed on the current stream.
        self._stream.wait_stream(self._streams.current_stream())
        end = self._enqueue(job, [(event, observers)])

        def wait() -> None:
            # The host goes on. The buffers may be freed: the current stream uses their memory again behind the event.
            self._streams.current_stream().wait_event(end)
            self._running.tell_ended()

        return wait

    def submit_message(self, message: Message, event: CollectiveEvent, observers: Observers) -> Job:
        """Hold a message until somebody waits for it or a collective is issued: what is held may travel together.

        A stream does one thing after another. Two ranks that both send first and then receive would each wait for the
        other's receive, which stands behind its send.
        """
        self._stream.wait_stream(self._streams.current_stream())  # now: what comes later does not change the buffer
        held = _Held(message, event, observers)
        self._held.append(held)

        def wait() -> None:
            if held in self._held:
                self._let_travel(_together(self._held, held))
            assert event.device_times is not None
            self._streams.current_stream().wait_event(event.device_times[1])
            self._running.tell_ended()

        return wait

    def close(self) -> None:
        """Wait for the stream."""
        self._let_travel(self._held)
        # The host waits: the group may be destroyed after this, and only now have all end events been passed.
        self._stream.synchronize()
        self._running.tell_ended()

    def _let_travel(self, leaving: Sequence[_Held]) -> None:
        if not leaving:
            return
        messages = [held.message for held in leaving]
        self._held = [held for held in self._held if held not in leaving]

        def job() -> None:
            messages[0].transport.exchange(messages)
            for message in messages:
                if message.after is not None:
                    message.after()

        self._enqueue(job, [(held.event, held.observers) for held in leaving])

    def _enqueue(self, job: Job, told: Sequence[tuple[CollectiveEvent, Observers]]) -> DeviceEvent:
        with self._streams.stream(self._stream):
            begin = mark(self._streams)
            job()
            end = mark(self._streams)
        for event, observers in told:
            event.device_times = (begin, end)
            self._running.add(event, observers)
        return end


def _together(held: Sequence[_Held], waited: _Held) -> list[_Held]:
    """What has to leave with the message that is waited for.

    Messages that are grouped end together. So a receive takes along all sends, which the other side may need first,
    and no receive behind it, for which the other side may need this one first. A send takes along all.
    """
    if waited.message.is_send:
        return list(held)
    place = held.index(waited)
    return [one for at, one in enumerate(held) if at <= place or one.message.is_send]
