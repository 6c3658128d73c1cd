"""Python objects between ranks: small things such as results and settings, never tensors of a training step."""

import torch.distributed as dist


def all_gather_object(value: object) -> list[object]:
    """Every rank's ``value``, in rank order, on every rank of the default group.

    The objects are pickled: on NCCL they travel through the current CUDA device, on gloo through host memory. Every
    rank has to call it. Communicates about (N - 1) times the largest pickled object per rank.

    Args:
        value: anything that pickles.

    Returns:
        ``world_size`` objects; element ``r`` is what rank ``r`` gave.
    """
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
