"""HFSDP: parameters are sharded inside a host, and what is stepped over all ranks.

What differs from ``fsdp`` with
hybrid_shard: the optimizer's state. There every host steps all of the model, after an all-reduce of gradients across
hosts. Here gradients are reduce-scattered inside the host, then across hosts; each rank steps 1/N, and after the step
parameters are all-gathered across hosts, of each rank's chunk alone. Across hosts travels what the all-reduce sent, in
two halves.

Inside ``no_sync()`` gradients are reduce-scattered inside the host, and rest partial: a chunk of sums on each rank, to
which the next backward adds. Only the last one sends across hosts; a step without one sends what rests, after one more
reduce-scatter inside the host, of zeros.

Per rank for P fp32 parameters with Adam, hosts of S ranks, R hosts, N = S x R: at rest 4P/S parameters, 4P/N gradients
(4P/S while they rest partial), 8P/N state; on the wire 3P(S-1)/S elements a step inside the host, and 2P/S (R-1)/R
across hosts. With a ``precision`` the shard is rounded, as is all that travels, and a rank steps its 1/N of it
unrounded: its master weights.
Source: NVIDIA Megatron-FSDP, hybrid sharding with ``outer_dp_sharding_strategy="optim"``.
"""

from dataclasses import replace
from typing import Any

from shardlab.engines.fsdp import FSDP
from shardlab.engines.sharded_params import Shards


class HFSDP(FSDP):
    """Parameters sharded over the axis ``shard``, optimizer state over ``replica`` too. Options as ``FSDP``."""

    name = "hfsdp"
    sends_in_no_sync = True
    divides = "state"
    kept: type[Shards] | None = None

    def __init__(self, **options: Any) -> None:
        for option in {"sharding", "offload"} & set(options):
            raise ValueError(f"{option}: {self.name!r} takes none; leave it out, or take fsdp")
        super().__init__(sharding="hybrid_shard", **options)
        self.options = replace(self.options, divides=self.divides, kept=self.kept)
