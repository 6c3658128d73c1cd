"""Ranks of one host on CPU tensors: what one rank writes into memory that all see, the others read.

All-reduce, reduce-scatter and all-gather work this way, in segments that stay in the cache. They move as many bytes as
a ring, but through no socket: about half of gloo's processor time, and a third to two thirds of its time. They sum as
``gloo`` does: in the order of the ranks, pair by pair. Broadcast, all-to-all, send and recv, which are rare, use gloo.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.transports.base import Bounds, Reduction
from shardlab.comm.transports.gloo import GlooTransport, add_in_order
from shardlab.comm.transports.shared_buffers import Call, SharedBuffers
from shardlab.partition.uneven import chunk_bounds
from shardlab.vocabulary import Collective, HostTransport

Add = Callable[..., Tensor]
_ADD: dict[Reduction, Add] = {"sum": torch.add, "max": torch.maximum}


class SharedMemoryTransport(GlooTransport):
    """Collectives through shared buffers.

    Args:
        group: a gloo process group, of which this process is a member.
        shared: the buffers of the same group.
    """

    name = HostTransport.SHARED_MEMORY

    def __init__(self, group: dist.ProcessGroup, shared: SharedBuffers) -> None:
        super().__init__(group)
        self._shared = shared

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Segment by segment: each rank reduces its part of it, then all gather the parts."""
        _require_addable(tensor.dtype)
        call = Call.of(Collective.ALL_REDUCE, tensor, tag, reduction)
        for segment in tensor.split(self._num_ranks * self._part_length(tensor.dtype)):
            bounds = chunk_bounds(segment.numel(), self._num_ranks)
            own = segment[bounds[self._rank] : bounds[self._rank + 1]]
            # No other rank needs this rank's term of its own part, so the sum may go over it.
            self._reduce_parts(call, own, segment, bounds, _ADD[reduction])
            self._gather_parts(call, segment, bounds)

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Nothing: only the queue's thread can do it."""

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Segments of all chunks at once."""
        _require_addable(buffer.dtype)
        call = Call.of(Collective.REDUCE_SCATTER, buffer, tag, bounds)
        self._reduce_parts(call, output, buffer, bounds, torch.add)

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Segments of all chunks at once."""
        self._gather_parts(Call.of(Collective.ALL_GATHER, buffer, tag, bounds), buffer, bounds)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Over gloo, where ranks in different collectives wait; so they first compare what they are in."""
        self._shared.synchronize(Call.of(Collective.BROADCAST, tensor, "", src))
        super().broadcast(tensor, src)

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Over gloo, as a broadcast."""
        self._shared.synchronize(Call.of(Collective.ALL_TO_ALL, buffer, ""))
        super().all_to_all(output, buffer)

    def barrier(self) -> None:
        """One synchronisation of the buffers."""
        self._shared.synchronize(Call(Collective.BARRIER, 0, "", ""))

    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:
        """The buffers are there once, for all collectives, outside of torch's memory."""
        return 0

    def close(self) -> None:
        """Close the shared buffers."""
        self._shared.close()

    def _part_length(self, dtype: torch.dtype) -> int:
        """Elements for each rank that fit into a half of a buffer."""
        return self._shared.length(dtype) // self._num_ranks

    def _reduce_parts(self, call: Call, output: Tensor, buffer: Tensor, bounds: Bounds, add: Add) -> None:
        """This rank's chunk, reduced, into ``output``, which may be that part of ``buffer``."""
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        length = self._part_length(buffer.dtype)
        # As many rounds on every rank, also where its own chunk is shorter: in each of them all ranks synchronise.
        for start in range(0, max(chunk.numel() for chunk in chunks), length):
            parts = [chunk[start : start + length] for chunk in chunks]
            place_of_all = self._shared.own(buffer.dtype)
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    place_of_all[rank * length : rank * length + part.numel()].copy_(part)
            # After it the others read what this rank wrote, and this rank writes the other half of its buffer.
            self._shared.synchronize(call)
            own = parts[self._rank]
            place = slice(self._rank * length, self._rank * length + own.numel())
            versions = [
                own if rank == self._rank else self._shared.of(rank, buffer.dtype)[place]
                for rank in range(self._num_ranks)
            ]
            # Another rank's memory: each rank sums at its own place, so nobody else reads what is overwritten here.
            room = versions[1 if self._rank == 0 else 0]
            add_in_order(versions, output[start : start + length], room, add)

    def _gather_parts(self, call: Call, buffer: Tensor, bounds: Bounds) -> None:
        """Every rank's chunk into its place."""
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        length = self._shared.length(buffer.dtype)
        # The longest chunk decides, on all ranks alike: each round is a synchronisation of all.
        for start in range(0, max(chunk.numel() for chunk in chunks), length):
            parts = [chunk[start : start + length] for chunk in chunks]
            own = parts[self._rank]
            self._shared.own(buffer.dtype)[: own.numel()].copy_(own)
            self._shared.synchronize(call)
            # Copied now: what the others wrote is valid only until the next synchronisation.
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(self._shared.of(rank, buffer.dtype)[: part.numel()])


def _require_addable(dtype: torch.dtype) -> None:
    """Checked on all ranks before any has written: a rank with nothing to add would wait for one that cannot add."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise RuntimeError(f"dtype: {dtype} cannot be added; reduce in bfloat16 or float32")
