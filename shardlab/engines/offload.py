"""CPU offload: shards stay in host memory and are on the device only while they are needed.

===========  ==============================  ==========================================================
offload      in host memory between steps    crosses the bus in a step, for P parameters on N ranks
===========  ==============================  ==========================================================
none         nothing                         nothing
parameters   parameters                      every gather's chunk up; for the step P/N up and P/N down
all          parameters, gradients, state    every gather's chunk up, the gradients' P/N down
===========  ==============================  ==========================================================

With ``all`` the optimizer steps on the CPU. On CUDA the host's copies are pinned. On CPU ranks host and device are the
same memory; the same copies are made and the same tensors freed, so that records show what a device would hold.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

import psutil
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
    """A copy of ``tensor`` in host memory, pinned where it comes from a CUDA device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def check_host_memory(needed_bytes: int, num_ranks: int) -> None:
    """Refuse what does not fit, before anything is moved.

    Args:
        needed_bytes: what one rank needs.
        num_ranks: on the mesh; those on this host share its memory.

    Raises:
        ValueError: the host has less free memory than its ranks need.
    """
    neighbours = min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))  # set by torchrun
    available = psutil.virtual_memory().available
    if needed_bytes * neighbours > available:
        raise ValueError(
            f"offload: the {neighbours} ranks of this host need at least {needed_bytes * neighbours / 1e9:.3g} GB of "
            f"its memory, and {available / 1e9:.3g} GB are free; use offload='none', or more hosts"
        )
