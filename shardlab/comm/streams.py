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


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in host memory, pinned where it comes from a CUDA device, that ends on its stream."""
    return copy_to_host(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda), tensor)


def copy_to_host(host: Tensor, tensor: Tensor) -> Tensor:
    """Copy behind the work of the current stream: ``host`` may be read or written after ``wait_for_copies``."""
    return host.copy_(tensor, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Let the host wait for all copies that the current stream of ``device`` has been given."""
    if device.type == "cuda":
        # Blocking, so that the host's thread sleeps: the ranks of a host share its cores.
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


def read_later(number: Tensor) -> Callable[[], float]:
    """How to read a number, [1], so that the host waits for what is before it on the device and for nothing else."""
    host, copied = torch.empty(number.shape, dtype=number.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(number, non_blocking=True)
    copied.record()

    def read() -> float:
        copied.synchronize()
        return float(host.item())

    return read
