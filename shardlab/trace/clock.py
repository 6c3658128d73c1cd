"""One time axis for all ranks of a host: nanoseconds of ``time.perf_counter_ns``, which is CLOCK_MONOTONIC on Linux.

On CPU a mark is that number. On CUDA a mark is an event on the current stream, so that nothing is synchronised while a
step runs; after the step the events are resolved against one event whose host time is known.
"""

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Protocol, cast

import torch

Mark = int | torch.cuda.Event


class Clock(Protocol):
    """Takes marks during a step and turns them into nanoseconds after it."""

    def mark(self) -> Mark:
        """A mark of this moment, in the order of the compute."""

    def resolve(self, marks: Sequence[Mark]) -> Sequence[int]:
        """Nanoseconds of ``time.perf_counter_ns``; after the step."""

    def settle(self) -> None:
        """Wait until all marks can be resolved; at the end of a step."""


class HostClock:
    """For compute on the CPU."""

    mark = staticmethod(perf_counter_ns)

    def resolve(self, marks: Sequence[Mark]) -> Sequence[int]:
        """The marks themselves."""
        return cast("Sequence[int]", marks)

    def settle(self) -> None:
        """Nothing to wait for: host marks are known at once."""


class CudaClock:
    """For compute on a CUDA stream."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # or work under way would lie between the event and the host's clock
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_ns = perf_counter_ns()

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: Sequence[Mark]) -> Sequence[int]:
        """Host times of events that have happened."""
        return [self._zero_ns + int(self._zero.elapsed_time(cast("torch.cuda.Event", mark)) * 1e6) for mark in marks]

    def settle(self) -> None:
        """Synchronise. The step is over, so that disturbs no measurement."""
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device's compute."""
    return CudaClock() if device.type == "cuda" else HostClock()
