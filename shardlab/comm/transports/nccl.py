"""NCCL as it is: its calls enqueue on the current stream, which ``StreamQueue`` makes a stream of its own.

What is only copied is sent as bytes, so that every dtype travels; NCCL itself refuses int16, for example.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from shardlab.comm.transports.base import Bounds, Message, Reduction, Transport
from shardlab.comm.transports.gloo import REDUCE_OPS, as_bytes

# torch 2.13 names these ..._single and warns at the old names, which are all that 2.11 has. Decided here, once.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclTransport(Transport):
    """Collectives over NCCL on CUDA tensors; equal chunks take the one-call path, uneven ones a grouped call."""

    emulated = False
    name = "nccl"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Reduce in place."""
        dist.all_reduce(tensor, REDUCE_OPS[reduction], self._group)

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """In place where ``output`` is this rank's chunk of ``buffer``."""
        chunks = _chunks(buffer, bounds)
        # By the bounds, which all ranks share: ranks that made different calls would wait for each other.
        if len({chunk.numel() for chunk in chunks}) == 1:
            _reduce_scatter(output, buffer, group=self._group)
        else:
            dist.reduce_scatter(output, chunks, group=self._group)

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """In place."""
        chunks = [as_bytes(chunk) for chunk in _chunks(buffer, bounds)]
        if len({chunk.numel() for chunk in chunks}) == 1:
            _all_gather(as_bytes(buffer), chunks[self._rank], group=self._group)
        else:
            dist.all_gather(chunks, chunks[self._rank], group=self._group)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy from ``src``."""
        dist.broadcast(as_bytes(tensor), group=self._group, group_src=src)

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Copy bytes."""
        dist.all_to_all_single(as_bytes(output), as_bytes(buffer), group=self._group)

    def exchange(self, messages: Sequence[Message]) -> None:
        """In one grouped call, for NCCL has one stream for both ways: a send would keep the receive behind it waiting.

        Even one message goes this way: alone it would use another communicator than the group its other end may be in.
        """
        calls = [
            dist.P2POp(
                dist.isend if message.is_send else dist.irecv,
                as_bytes(message.tensor),
                group=self._group,
                group_peer=message.peer,
            )
            for message in messages
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()  # the current stream, not the host

    def barrier(self) -> None:
        """A barrier on the stream."""
        dist.barrier(self._group)


def _chunks(buffer: Tensor, bounds: Bounds) -> list[Tensor]:
    return [buffer[start:stop] for start, stop in pairwise(bounds)]
