"""hpZ: parameters are sharded over all ranks, and what was gathered stays inside each host until the step.

What differs from ``fsdp`` with full_shard over all ranks: a second chunk. The first gather of a unit after a step goes
over all ranks, across hosts. Of what it brings each rank keeps its part of the host's copy; every later gather, in
backward and in other micro-batches, is among the ranks of the host. Gradients are reduce-scattered over all ranks.

Per rank for P fp32 parameters with Adam, hosts of S ranks, N ranks in all: at rest 4P/N parameters, 4P/N gradients,
8P/N state; between the first forward and the step another 4P/S (2P/S with ``precision='bf16'``). On the wire, elements
a step: P(N-1)/N and P(N-1)/N over all ranks, P(S-1)/S inside the host.
Source: Wang et al., ZeRO++, arXiv 2306.10209, section 3.2.
"""

from typing import Any

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.engines.hfsdp import HFSDP
from shardlab.engines.plain_mode import in_plain_mode
from shardlab.engines.sharded_params import Shards


class HostShards(Shards):
    """Shards over all ranks, of which the ranks of a host have a copy; other arguments as ``Shards``.

    Args:
        host: the ranks of this one.
    """

    _kept: Tensor | None = None  # of what was gathered, the part of this rank

    def __init__(self, host: Communicator, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._host, self._cut = host, self.layout.bounds[:: self.layout.num_ranks // host.num_ranks]

    @in_plain_mode
    def start(self, *, as_stored: bool = False) -> None:
        """Begin to gather: among the ranks of the host, if they have kept what was gathered."""
        if self._kept is None or as_stored or self.is_stepped:
            super().start(as_stored=as_stored)
            return
        buffer = torch.empty(self.layout.padded_numel, dtype=self.compute_dtype, device=self.device)
        tag = f"parameters of {self.name}"
        self._gathering = buffer, self._host.all_gather(buffer, self._kept, bounds=self._cut, tag=tag)

    @in_plain_mode
    def show_gathered(self) -> None:
        """As ``Shards``; a part of what the first gather has brought is kept."""
        assert self._gathering is not None
        buffer, pending = self._gathering
        pending.wait()
        if self._kept is None and not self.is_stepped and buffer.dtype == self.compute_dtype:
            self._kept = buffer[self._cut[self._host.rank] : self._cut[self._host.rank + 1]].clone()
        super().show_gathered()

    def changed(self) -> None:
        """The values are others now: what was kept is not them any more."""
        super().changed()
        self._kept = None

    def write_back(self) -> None:
        """As ``Shards``; what was kept is dropped."""
        self._kept = None  # on all ranks, whatever this one finds changed
        super().write_back()

    def gathered_tensors(self) -> list[Tensor]:
        """As ``Shards``, and what was kept for the next gather."""
        return super().gathered_tensors() + ([] if self._kept is None else [self._kept])


class HPZ(HFSDP):
    """Sharded over the axes ``replica`` and ``shard``, and kept once in each host. Options as ``FSDP``.

    It derives from HFSDP for its axes and options alone.
    """

    name = "hpz"
    sends_in_no_sync = False
    divides = "parameters"
    kept = HostShards
