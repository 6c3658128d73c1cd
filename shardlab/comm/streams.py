"""What queues, clocks and copies need of a device with streams; ``torch.cuda`` has all of it.

Code that uses streams takes them as an argument, so that its order, its times and its hangs can be tested against
streams whose work takes a known time.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import torch

from shardlab.comm.events import DeviceEvent, Mark


class DeviceStream(Protocol):
    """Work that a device does in the order in which it was given."""

    def wait_event(self, event: Any) -> None:
        """Do what is given from now on after the event."""

    def wait_stream(self, stream: Any) -> None:
        """Do what is given from now on after all that the other stream has now."""

    def synchronize(self) -> None:
        """Let the host wait for all of it."""


class Streams(Protocol):
    """The streams of a device, as ``torch.cuda`` has them."""

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> DeviceEvent:  # noqa: N802
        """A new event."""

    def Stream(self, device: Any = None) -> DeviceStream:  # noqa: N802
        """A new stream."""

    def current_stream(self, device: Any = None) -> DeviceStream:
        """The stream that gets the work."""

    def default_stream(self, device: Any = None) -> DeviceStream:
        """The stream that gets it unless another was chosen: where modules compute."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the current one."""

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""


CUDA = cast(Streams, torch.cuda)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for the CPU, which has none."""
    return CUDA if device.type == "cuda" else None


def mark(streams: Streams) -> DeviceEvent:
    """An event with a time, behind the work that the current stream has now."""
    event = streams.Event(enable_timing=True)
    event.record()
    return event


def mark_of(device: torch.device) -> Mark | None:
    """What marks the stream that computes on a device; None for the CPU."""
    streams = streams_of(device)
    return None if streams is None else partial(mark, streams)
