"""NCCL as it is: its calls enqueue on the current stream, which ``StreamQueue`` makes a stream of its own.

What is only copied is sent as bytes, so that every dtype travels; NCCL itself refuses int16, for example.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.transports.base import Bounds, Message, Reduction, Transport
from shardlab.comm.transports.gloo import REDUCE_OPS, as_bytes
from shardlab.partition.chunks import even_bounds

# torch 2.13 names these ..._single and warns at the old names, which are all that 2.11 has. Decided here, once.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SUMMED_SIZES = tuple(4**power for power in range(3, 14))  # bytes: 64 B to 64 MiB


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

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to one rank."""
        self.exchange([Message(self, True, tensor, dst)])

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive from one rank."""
        self.exchange([Message(self, False, tensor, src)])

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


def require_signed_zeros(
    transport: Transport, num_ranks: int, device: torch.device, sizes: Sequence[int] = SUMMED_SIZES
) -> None:
    """Refuse a transport that adds -0 and -0 to +0; collective over its group.

    The sign of zero tells parameters that no rank used from those with zero gradients (``engines.unused_params``). Who
    adds depends on the machine and on the size of a message: a switch that adds on the way (NVLink SHARP) says nothing
    of signed zeros. So sums of several sizes are tried, in each dtype that gradients are reduced in.

    Args:
        transport: of the group.
        num_ranks: of the group.
        device: of the tensors.
        sizes: bytes of the sums, multiples of 8.

    Raises:
        RuntimeError: on all ranks, if the sign is lost on one.
    """
    lost = torch.zeros(1, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for size in sizes:
            bounds = even_bounds(size // dtype.itemsize, num_ranks)
            reduced = torch.full((bounds[-1],), -0.0, dtype=dtype, device=device)
            scattered, chunk = reduced.clone(), reduced[: bounds[1]].clone()
            transport.all_reduce(reduced, "sum")
            transport.reduce_scatter(chunk, scattered, bounds)
            for result in (reduced, chunk):
                lost += result.signbit().logical_not().any()
    # Agreed on first: a rank that raised alone would leave the others waiting in their first collective.
    transport.all_reduce(lost, "max")
    if lost.item():
        raise RuntimeError(
            f"{transport.name}: the sum of -0 and -0 comes back as +0, so a parameter that no rank used could not be "
            "told from one with a zero gradient; set NCCL_NVLS_ENABLE=0 in the environment before ranks start"
        )


def _chunks(buffer: Tensor, bounds: Bounds) -> list[Tensor]:
    return [buffer[start:stop] for start, stop in pairwise(bounds)]
