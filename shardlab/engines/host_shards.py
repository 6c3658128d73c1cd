"""hpZ's second chunk: the ranks of a host keep what was gathered, a part each, until the parameters change.

So each later gather is theirs alone. The first one after a step goes over all ranks. (See ``hfsdp.HPZ``.)
"""

from typing import Any

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
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
        if self._kept is None or as_stored:
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
        if self._kept is None and buffer.dtype == self.compute_dtype:
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
