"""What queues, clocks and copies need of a device with streams; ``torch.cuda`` has all of it.

Code that uses streams takes them as an argument, so that its order, its times and its hangs can be tested against
streams whose work takes a known time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardlab.comm.events import DeviceEvent, Mark

DeviceStream = torch.cuda.Stream
Streams: TypeAlias = Any
"""The streams of a device: ``torch.cuda``, or what stands for it in a test."""
CUDA: Streams = torch.cuda


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for the CPU, which has none."""
    return CUDA if device.type == "cuda" else None


def mark(streams: Streams) -> DeviceEvent:
    """An event with a time, behind the work that the current stream has now."""
    event: DeviceEvent = streams.Event(enable_timing=True)
    event.record()
    return event


def mark_of(device: torch.device) -> Mark | None:
    """What marks the stream that computes on a device; None for the CPU."""
    streams = streams_of(device)
    return None if streams is None else partial(mark, streams)


def read_later(number: Tensor) -> Callable[[], float]:
    """How to read a number, [1], so that the host waits for what is before it on the device and for nothing else."""
    host, copied = torch.empty(number.shape, dtype=number.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(number, non_blocking=True)
    copied.record()

    def read() -> float:
        copied.synchronize()
        return float(host.item())

    return read
