"""CPU offload: shards that live in host memory and visit the device only while they are needed.

===========  ==============================  ==========================================================
offload      in host memory between steps    crosses the bus in a step, for P parameters on N ranks
===========  ==============================  ==========================================================
none         nothing                         nothing
parameters   parameters                      every gather's chunk up; for the step P/N up and P/N down
all          parameters, gradients, state    every gather's chunk up, the gradients' P/N down
===========  ==============================  ==========================================================

With ``all`` the optimizer steps on the CPU. On CUDA the host's copies are pinned. On CPU ranks host and device are the
same memory; the same copies are made and the same tensors let go, so that records show what a device would hold.
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
        needed_bytes: of one rank.
        num_ranks: on the mesh; of them those of this host share its memory.

    Raises:
        ValueError: the host has less free memory than its ranks need.
    """
    neighbours = min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))  # torchrun tells
    available = psutil.virtual_memory().available
    if needed_bytes * neighbours > available:
        raise ValueError(
            f"offload: {neighbours} ranks of this host would keep {needed_bytes * neighbours / 1e9:.3g} GB and more in "
            f"its memory, of which {available / 1e9:.3g} GB are free; use offload='none', or more hosts"
        )
