"""Many small tensors moved as few large messages.

A small message costs nearly as much as a large one (0.2 ms at 2 ranks, 4 ms at 4 on a busy laptop). So the tensors are
packed by dtype and device into flat buffers of at most 64 MiB, or of one larger tensor.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator

MESSAGE_BYTES = 64 * 1024**2


def broadcast_coalesced(comm: Communicator, tensors: Iterable[Tensor], src: int = 0, *, tag: str = "") -> None:
    """Copy each tensor from group rank ``src`` to the other ranks, in place; blocking.

    Every rank must pass tensors of the same shapes and dtypes in the same order.
    """
    if comm.num_ranks == 1:
        return
    # One after another, each waited for: no more than one packed copy is held at a time.
    for together in _messages(tensors):
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in together])
        comm.broadcast(packed, src, tag=tag).wait()
        if comm.rank == src:
            continue  # its tensors are the originals
        for tensor, part in zip(together, packed.split([tensor.numel() for tensor in together]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    # By the order in which kinds are first seen: all ranks must come to the same messages in the same order.
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        message: list[Tensor] = []
        num_bytes = 0
        for tensor in same:
            if message and num_bytes + tensor.nbytes > MESSAGE_BYTES:
                yield message
                message, num_bytes = [], 0
            message.append(tensor)
            num_bytes += tensor.nbytes
        yield message
