"""CPU offload: shards stay in host memory and are on the device only while they are needed.

===========  ==============================  ==========================================================
offload      in host memory between steps    crosses the bus in a step, for P parameters on N ranks
===========  ==============================  ==========================================================
none         nothing                         nothing
parameters   parameters                      every gather's chunk up; for the step P/N up and P/N down
all          parameters, gradients, state    every gather's chunk up, the gradients' P/N down
===========  ==============================  ==========================================================

``sharded.py`` says when they move. With ``all`` the optimizer steps on the CPU. On CUDA the host's copies
are pinned, and the host goes on while they are made: it waits once, for all of them, before it reads or writes any. On
CPU ranks host and device are the same memory; the same copies are made and the same tensors freed, so that records show
what a device would hold.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.
"""

from collections.abc import Mapping
from typing import NamedTuple

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
