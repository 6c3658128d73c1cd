"""CPU offload: shards stay in host memory and are on the device only while they are needed.

===========  ==============================  ==========================================================
offload      in host memory between steps    crosses the bus in a step, for P parameters on N ranks
===========  ==============================  ==========================================================
none         nothing                         nothing
parameters   parameters                      every gather's chunk up; for the step P/N up and P/N down
all          parameters, gradients, state    every gather's chunk up, the gradients' P/N down
===========  ==============================  ==========================================================

``sharded_strategy.py`` says when they move. With ``all`` the optimizer steps on the CPU. On CUDA the host's copies
are pinned, and the host goes on while they are made: it waits once, for all of them, before it reads or writes any. On
CPU ranks host and device are the same memory; the same copies are made and the same tensors freed, so that records show
what a device would hold.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab import vocabulary


class Offload(NamedTuple):
    """A row of the table."""

    parameters: bool
    gradients_and_state: bool


OFFLOADS: Mapping[str, Offload] = {
    vocabulary.Offload.NONE: Offload(False, False),
    vocabulary.Offload.PARAMETERS: Offload(True, False),
    vocabulary.Offload.ALL: Offload(True, True),
}


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
