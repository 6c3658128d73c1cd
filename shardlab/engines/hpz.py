"""hpZ: parameters are sharded over all ranks, and what was gathered stays inside each host until the step.

What differs from ``fsdp`` with full_shard over all ranks: a second chunk. The first gather of a unit after a step goes
over all ranks, across hosts. Of what it brings each rank keeps its part of the host's copy; every later gather, in
backward and in other micro-batches, is among the ranks of the host. Gradients are reduce-scattered over all ranks.

Per rank for P fp32 parameters with Adam, hosts of S ranks, N ranks in all: at rest 4P/N parameters, 4P/N gradients,
8P/N state; between the first forward and the step another 4P/S (2P/S with ``precision='bf16'``). On the wire, elements
a step: P(N-1)/N and P(N-1)/N over all ranks, P(S-1)/S inside the host. (It derives from HFSDP for its axes and options
alone.) Source: Wang et al., ZeRO++, arXiv 2306.10209, section 3.2.
"""

from shardlab.engines.hfsdp import HFSDP


class HPZ(HFSDP):
    """Parameters sharded over the axes ``replica`` and ``shard``, a second copy over ``shard``. Options as ``FSDP``."""

    name = "hpz"
    rests_partial = False
    divides = "parameters"
