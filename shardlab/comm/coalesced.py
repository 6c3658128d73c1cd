"""Many small tensors moved as few large messages.

A small message costs nearly as much as a large one (0.2 ms at 2 ranks, 4 ms at 4 on a busy laptop). So the tensors are
packed by dtype and device into flat buffers of at most 64 MiB, or of one larger tensor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.partition.messages import packed


def broadcast_coalesced(comm: Communicator, tensors: Iterable[Tensor], src: int = 0, *, tag: str = "") -> None:
    """Copy each tensor from group rank ``src`` to the other ranks, in place; blocking.

    Every rank must pass tensors of the same shapes and dtypes in the same order.
    """
    if comm.num_ranks == 1:
        return
    # One after another, each waited for: no more than one packed copy is held at a time.
    for together in packed(tensors, lambda tensor: (tensor.dtype, tensor.device), lambda tensor: tensor.nbytes):
        message = torch.cat([tensor.detach().reshape(-1) for tensor in together])
        comm.broadcast(message, src, tag=tag).wait()
        if comm.rank == src:
            continue  # its tensors are the originals
        for tensor, part in zip(together, message.split([tensor.numel() for tensor in together]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
