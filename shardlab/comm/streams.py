"""What queues, clocks and copies need of a device with streams; ``torch.cuda`` has all of it.

Code that uses streams takes them as an argument, so that its order, its times and its hangs can be tested against
streams whose work takes a known time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

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


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """A tensor of numbers, int32, for whose copy to a device the host does not wait."""
    host = torch.empty(len(numbers), dtype=torch.int32, pin_memory=device.type == "cuda")
    host.numpy()[:] = numbers
    return host.to(device, non_blocking=True)


def read_later(numbers: Tensor) -> Callable[[], list[int]]:
    """How to read numbers, 1-d, so that the host waits for what is before them on the device and for nothing else."""
    if not numbers.is_cuda:
        return cast(Callable[[], list[int]], numbers.tolist)
    host, copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(numbers, non_blocking=True)
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return cast(list[int], host.tolist())

    return read
