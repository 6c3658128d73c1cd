"""One time axis for all ranks of a host: nanoseconds of ``time.perf_counter_ns``, which is CLOCK_MONOTONIC on Linux.

On CPU a mark is that number. On CUDA a mark is an event on the current stream, so that nothing is synchronised while a
step runs; after the step the events are resolved against one event whose host time is known.
"""

from time import perf_counter_ns
from typing import Protocol

import torch

Mark = float | torch.cuda.Event


class Clock(Protocol):
    """Makes marks now and turns them into nanoseconds later."""

    def mark(self) -> Mark:
        """Now, in the order of the compute."""

    def resolve(self, mark: Mark) -> float:
        """Nanoseconds of ``time.perf_counter_ns``; after the step."""

    def settle(self) -> None:
        """Wait until all marks can be resolved; at the end of a step."""


class HostClock:
    """For compute on the CPU."""

    def mark(self) -> Mark:
        """The host's time."""
        return perf_counter_ns()

    def resolve(self, mark: Mark) -> float:
        """The mark itself."""
        assert not isinstance(mark, torch.cuda.Event)
        return mark

    def settle(self) -> None:
        """Host marks are there at once."""


class CudaClock:
    """For compute on a CUDA stream."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_ns = perf_counter_ns()

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, mark: Mark) -> float:
        """Host time of an event that has happened."""
        if isinstance(mark, torch.cuda.Event):
            return self._zero_ns + float(self._zero.elapsed_time(mark)) * 1e6
        return mark

    def settle(self) -> None:
        """The step is over: waiting here no longer disturbs what was measured."""
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device's compute."""
    return CudaClock() if device.type == "cuda" else HostClock()


class TimeAxis:
    """Microseconds since the start of the run, on one axis for all ranks of a host.

    Args:
        clock: of the compute.
        origin_ns: ``time.perf_counter_ns`` at the start of the run, the same on all ranks.
    """

    def __init__(self, clock: Clock, origin_ns: int) -> None:
        self._clock, self._origin_ns = clock, origin_ns

    def mark_us(self, mark: Mark) -> float:
        """When a mark was made; after the step."""
        return (self._clock.resolve(mark) - self._origin_ns) / 1e3

    def host_us(self, time_ns: float) -> float:
        """A host time on this axis; NaN stays NaN."""
        return (time_ns - self._origin_ns) / 1e3
