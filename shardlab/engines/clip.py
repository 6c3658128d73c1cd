"""Clipping by the global norm of gradients of which ranks hold pieces.

A norm of pieces is made from the pieces' norms: the p-th powers add up (p = 1, 2), or the largest counts (p = inf). So
one small reduction for each axis of the mesh is enough, and what all ranks of an axis hold alike is counted once. The
scaling itself is torch's, so that one rank gets bit for bit what plain torch gets.
Source of the method: Pascanu et al., arXiv 1211.5063, algorithm 1.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from math import inf, nan

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardlab.comm.communicator import Communicator

NORM_TYPES = (1.0, 2.0, inf)
Axes = tuple[Communicator, ...]


def clip_(
    tensors: Mapping[Axes, Iterable[Tensor]], max_norm: float, norm_type: float, device: torch.device,
    stages: Communicator | None = None,
) -> Tensor:  # fmt: skip
    """Scale the gradients of ``tensors`` in place; return the norm before clipping, 0-d, equal on all ranks.

    Args:
        tensors: what this rank steps, by the axes over which the other pieces are spread; () where every rank holds
            everything. Tensors without a gradient do not count.
        max_norm: greater than 0.
        norm_type: 1, 2 or inf.
        device: on which the axes communicate.
        stages: ranks with other stages of the model, whose gradients count too.

    Raises:
        ValueError: another norm type, or a ``max_norm`` that is not positive.
    """
    check_clipping(max_norm, norm_type)
    everything = [tensor for some in tensors.values() for tensor in some]
    norms = {
        # Nothing is in an empty one, of which torch refuses the largest value.
        axes: get_total_norm([tensor.grad for tensor in some if tensor.grad is not None and tensor.numel()], norm_type)
        for axes, some in tensors.items()
    }
    norm = norms[()] if set(norms) == {()} else _over_axes(norms, norm_type, device)
    if stages is not None:  # last, and one number: other stages may be spread otherwise
        norm = _over_axes({(stages,): norm}, norm_type, device)
    # A rank that holds nothing has a norm in torch's default dtype; all ranks must return the same dtype.
    # (Of one byte are frozen ones, which torch promotes to nothing.)
    dtypes = {tensor.dtype for tensor in everything if tensor.is_floating_point() and tensor.itemsize > 1}
    norm = norm.to(reduce(torch.promote_types, dtypes, torch.float32))
    # All ranks scale by this one number, so what several of them hold alike stays alike.
    clip_grads_with_norm_(everything, max_norm, norm)
    return norm


def check_clipping(max_norm: float, norm_type: float) -> None:
    """Refuse another norm type, or a ``max_norm`` that is not positive, with ValueError."""
    if norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type: {norm_type} is not one of 1, 2, inf")
    if not max_norm > 0:
        raise ValueError(f"max_norm: {max_norm} is not greater than 0")


def _over_axes(norms: Mapping[Axes, Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The global norm, in float64: one reduction per axis, of one number for each group of tensors spread over it."""
    power = 1.0 if norm_type == inf else norm_type
    parts = {axes: norm.to(device, torch.float64) ** power for axes, norm in norms.items()}
    # The axes in the order in which parameters use them, which is the module's and so the same on every rank.
    for comm in dict.fromkeys(comm for axes in parts for comm in axes):
        spread = [axes for axes in parts if comm in axes]
        message = torch.stack([parts[axes] for axes in spread])
        if norm_type == inf:
            # Beside each norm whether it is NaN, which the maximum of some transports leaves out.
            message = torch.cat([message.nan_to_num(nan=0.0, posinf=inf), message.isnan().to(message)])
        comm.all_reduce(message, reduction="max" if norm_type == inf else "sum", tag="gradient norm").wait()
        if norm_type == inf:
            largest, are_nan = message.chunk(2)
            message = largest.masked_fill(are_nan > 0, nan)
        # A group that is spread over two axes is reduced again, over the second, from these results.
        parts.update(zip(spread, message.unbind(), strict=True))
    values = torch.stack(list(parts.values()))
    return values.max() if norm_type == inf else values.sum() ** (1.0 / power)
