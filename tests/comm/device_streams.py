"""Streams whose work takes a known time: a stand-in for ``torch.cuda`` where there is no GPU.

The host's clock stands still unless a test moves it. Work that is given to a stream begins when the stream has done all
before it, and not before now; so every time in a test follows from the durations it has named.
"""

import contextlib
from math import inf

import numpy as np


class Event:
    __slots__ = ("__dict__",)  # no weak references: torch 2.11 frees CUDA's events without clearing them

    def __init__(self, device):
        self._device, self.time = device, None

    def record(self, stream=None):
        stream = self._device.current_stream() if stream is None else stream
        self.time = stream.end()

    def query(self):
        return self.time is None or self.time <= self._device.now

    def synchronize(self):
        assert self.time != inf, "the host would wait for ever"
        self._device.num_synchronized += 1
        self._device.now = max(self._device.now, self.time)

    def elapsed_time(self, end_event):
        return float(np.float32((end_event.time - self.time) / 1e6))


class Stream:
    def __init__(self, device):
        self._device, self.free = device, 0

    def end(self):
        """When all it has now is done."""
        return max(self.free, self._device.now)

    def work(self, duration):
        self.free = self.end() + duration

    def wait_event(self, event):
        self.free = max(self.end(), event.time)

    def wait_stream(self, stream):
        self.free = max(self.end(), stream.end())

    def synchronize(self):
        assert self.free != inf, "the host would wait for ever"
        self._device.num_synchronized += 1
        self._device.now = max(self._device.now, self.free)


class Device:
    """The interface of ``torch.cuda``; times in nanoseconds.

    Attributes:
        now: the host's clock.
        num_synchronized: how often the host has waited for the device.
    """

    def __init__(self):
        self.now, self.num_synchronized, self.streams = 0, 0, []
        self._default = self._current = self.Stream()

    def Event(self, enable_timing=False, blocking=False):  # noqa: N802
        return Event(self)

    def Stream(self, device=None):  # noqa: N802
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, device=None):
        return self._current

    def default_stream(self, device=None):
        return self._default

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device=None):
        for stream in self.streams:
            stream.synchronize()

    def compute(self, duration):
        """Give work to the current stream; the host goes on."""
        self._current.work(duration)
