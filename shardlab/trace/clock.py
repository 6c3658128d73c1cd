"""One time axis for all ranks of a host: nanoseconds of ``time.perf_counter_ns``, which is CLOCK_MONOTONIC on Linux.

Hosts began to count at different times, so a run has one origin for each, read when all ranks have met.

On CPU a mark is that number. On CUDA a mark is an event on the current stream, so that nothing is synchronised while a
step runs. After the step the device is waited for, and the marks are resolved against an event recorded then, whose
host time is known. A new one at each step: two events tell their distance as a float32 of milliseconds, which after ten
minutes is exact to 62 microseconds only.

On CPU the clock also tells how much CPU time the thread that computes has used: a rank that sleeps, or whose core runs
other processes, does not compute. On CUDA that is not asked: spans are the stream's, and the host's thread may sleep
while kernels run.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import nan
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple, cast

import torch

from shardlab.comm import DeviceEvent
from shardlab.comm.streams import Streams, mark, streams_of

Mark = int | DeviceEvent


class Reading(NamedTuple):
    """What a rank's clock said at one moment.

    Attributes:
        clock: equal on two ranks if and only if their clocks are the same.
        time_ns: ``time.perf_counter_ns``.
    """

    clock: str
    time_ns: int

    @classmethod
    def now(cls) -> "Reading":
        """Of this process."""
        return cls(_name_of_clock(), perf_counter_ns())


Origins = Mapping[str, int]
"""Where times count from, by clock."""


def origins_of(readings: Iterable[Reading]) -> Origins:
    """The origins of a run: on each host what the first of its ranks read, of readings taken when all had met."""
    found: dict[str, int] = {}
    for reading in readings:
        found.setdefault(reading.clock, reading.time_ns)
    return found


def own_origin_ns(origins: Origins) -> int:
    """Where this process' times count from."""
    return origins[_name_of_clock()]


def _name_of_clock() -> str:
    """Each start of a machine has a clock, and each time namespace of Linux shifts it."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    if not boot.is_file():
        return platform.node()
    return boot.read_text().strip() + (str(namespace.readlink()) if namespace.is_symlink() else "")


CpuTime = Callable[[], int]
"""Nanoseconds of CPU time that one thread has used."""
CpuReading = tuple[int, int, float]
"""``time.perf_counter_ns``, and of one thread the CPU time and the time that it was queued for a core, in ns."""


def cpu_time_of_this_thread() -> CpuTime | None:
    """CPU time of the calling thread, which any thread may ask for; None where the system has no such clock.

    This also works if torch computes with several threads: the thread that calls an operation takes its share of every
    parallel region, and then spins until the others are done. (With GNU OpenMP; if there are more threads than cores
    can run, it sleeps there and so counts as off the CPU.) The time of the whole process says less: eight threads that
    compute for an eighth of the time use as much as one thread that computes all the time.
    """
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return None
    return partial(time.clock_gettime_ns, time.pthread_getcpuclockid(threading.get_ident()))


class QueuedTime:
    """How long the calling thread could have run and had no core, in nanoseconds so far; any thread may ask for it.

    Linux counts it at each switch, the second number of ``schedstat`` ("Scheduler Statistics" in its documentation):
    unlike a count of involuntary switches it is a time, and what is left of the time off the CPU was sleep. NaN where
    the system does not say. The file stays open, since to open it takes ten times as long as to read it.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        if Path(path).is_file():
            self._file = os.open(path, os.O_RDONLY)

    def __call__(self) -> float:
        """Read it."""
        if self._file is None:
            return nan
        ran, queued, _ = os.pread(self._file, 80, 0).split()
        return float(queued) if int(ran) else nan  # where it is switched off all are 0

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class CpuReadings:
    """How much CPU time the computing thread had used, at moments of one step.

    A reading is two system calls of a microsecond. So a moment that comes shortly after another is left out: all of
    them together cost half a per cent at most, however many units a step has.

    Args:
        cpu_time: of the calling thread, which computes; None takes no readings.
        earlier: readings before these.
    """

    LEAST_NS = 500_000

    def __init__(self, cpu_time: CpuTime | None, earlier: Sequence[CpuReading] = ()) -> None:
        self._cpu_time = cpu_time
        self._queued_time = None if cpu_time is None else QueuedTime()
        self._rows = [] if cpu_time is None else list(earlier)
        self._last_ns = 0

    def read(self, *, always: bool = False) -> None:
        """Take a reading; from any thread."""
        # Looked up once: ``stop()`` may be called from another thread in between.
        now_ns, cpu_time, queued_time = perf_counter_ns(), self._cpu_time, self._queued_time
        if cpu_time is not None and queued_time is not None and (always or now_ns - self._last_ns >= self.LEAST_NS):
            self._last_ns = now_ns
            self._rows.append((now_ns, cpu_time(), queued_time()))

    def stop(self) -> None:
        """Take no more readings: the thread may end, and the clock of an ended thread must not be read."""
        self._cpu_time = self._queued_time = None

    def between(self, begin_ns: int, end_ns: int) -> list[CpuReading]:
        """The readings from ``begin_ns`` to ``end_ns``, in order of time.

        The last reading before ``begin_ns`` counts as of that moment: the thread may lose the CPU between the reading
        and the mark that a step begins with, and that time is not of the step.
        """
        # Threads of the queues read too, so a later reading may have been noted before an earlier one.
        rows = sorted(row for row in self._rows if row[0] <= end_ns)
        before = [row[1:] for row in rows if row[0] <= begin_ns][-1:]
        return [(begin_ns, *row) for row in before] + [row for row in rows if row[0] > begin_ns]


def least_operation_ns() -> float:
    """CPU time of an operation on one number, again and again: what Python and torch take at least for any."""
    number, count, found = torch.ones(1), 100, []
    for _ in range(5):
        began_ns = time.thread_time_ns()
        for _ in range(count):
            number.add_(0.0)
        found.append((time.thread_time_ns() - began_ns) / count)
    return min(found)


class HostClock:
    """For compute on the CPU."""

    mark = staticmethod(perf_counter_ns)
    cpu_time = staticmethod(cpu_time_of_this_thread)

    def resolve(self, marks: Sequence[Mark]) -> Sequence[int]:
        """The marks themselves."""
        return cast("Sequence[int]", marks)

    def settle(self) -> None:
        """Nothing to wait for: host marks are known at once."""


class StreamClock:
    """For compute on a stream.

    Args:
        streams: of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.settle()

    def cpu_time(self) -> CpuTime | None:
        """Not asked: the host's thread may sleep while kernels run, and run while none does."""
        return None

    def mark(self) -> Mark:
        """An event on the current stream."""
        return mark(self._streams)

    def resolve(self, marks: Sequence[Mark]) -> Sequence[int]:
        """Host times of events that had happened when the clock was last settled."""
        events = cast("Sequence[DeviceEvent]", marks)
        # From the mark to the zero, which is the later of the two.
        return [self._zero_ns - int(event.elapsed_time(self._zero) * 1e6) for event in events]

    def settle(self) -> None:
        """Synchronise, and set the zero anew. The step is over, so that disturbs no measurement."""
        self._streams.synchronize()  # or work under way would lie between the event and the host's clock
        began_ns = perf_counter_ns()
        self._zero = mark(self._streams)
        self._zero.synchronize()
        self._zero_ns = (began_ns + perf_counter_ns()) // 2


Clock = HostClock | StreamClock
"""Takes marks during a step and turns them into nanoseconds after it."""


def clock_for(device: torch.device) -> Clock:
    """The clock of a device's compute."""
    streams = streams_of(device)
    return HostClock() if streams is None else StreamClock(streams)
