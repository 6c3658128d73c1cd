"""When the stream that computes waits for an event: so torch's engines wait, where nobody waits for a work.

FSDP2 gathers on a stream of its own, which records an event behind the collective; the stream that computes then waits
for this event. Both are methods of ``torch.cuda.Stream``; ``listen`` replaces them by ones that report each call.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardlab.comm.events import CollectiveEvent, DeviceEvent
from shardlab.comm.streams import DeviceStream, Streams

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
