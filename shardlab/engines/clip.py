"""Clipping by the global norm: over all parameters and, where gradients are sharded, over all ranks.

A norm of pieces is made from the pieces' norms: the p-th powers add up (p = 1, 2), or the largest counts (p = inf). So
one scalar reduction is enough. The scaling itself is torch's, so that one rank ends bit for bit where plain torch does.
Source of the method: Pascanu et al., arXiv 1211.5063, algorithm 1.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardlab.comm import Communicator

NORM_TYPES = (1.0, 2.0, inf)


def clip_(tensors: Sequence[Tensor], max_norm: float, norm_type: float, sharded_over: Communicator | None) -> Tensor:
    """Scale the gradients of ``tensors`` in place; the norm before clipping is returned, 0-d, equal on all ranks.

    Args:
        tensors: what this rank steps; those without a gradient do not count.
        max_norm: greater than 0.
        norm_type: 1, 2 or inf.
        sharded_over: the ranks that hold the other pieces; None where every rank holds everything.

    Raises:
        ValueError: another norm type, or a ``max_norm`` that is not positive.
    """
    if norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type: {norm_type} is not one of 1, 2, inf")
    if not max_norm > 0:
        raise ValueError(f"max_norm: {max_norm} is not greater than 0")
    norm = get_total_norm([tensor.grad for tensor in tensors if tensor.grad is not None], norm_type)
    if sharded_over is not None:
        norm = _over_ranks(norm, norm_type, sharded_over, like=tensors[0])
    clip_grads_with_norm_(list(tensors), max_norm, norm)
    return norm


def _over_ranks(norm: Tensor, norm_type: float, comm: Communicator, like: Tensor) -> Tensor:
    # float64 on every rank: a rank that holds nothing has a norm of torch's default dtype, which must not differ.
    total = norm.to(like.device, torch.float64)
    if norm_type == inf:
        comm.all_reduce(total, reduction="max", tag="gradient norm").wait()
    else:
        total = total**norm_type
        comm.all_reduce(total, tag="gradient norm").wait()
        total = total ** (1.0 / norm_type)
    return total.to(torch.promote_types(like.dtype, torch.float32))
