"""What this rank holds of torch's distributed tensors, in our terms: pieces, ranges, whole tensors.

A ``DTensor`` is replicated, or cut along one dim into blocks of ceil(size / N), like ``partition.dim0``. A block along
dim 0 is one range of the flattened parameter; along another dim it is one range for each index before that dim. All
functions here also take a plain tensor, as a whole one.
"""

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardlab.engines.clip import NORM_TYPES


def device_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Torch's mesh of one axis over a group.

    The axis is named after the group. Torch takes meshes with the same ranks and names for equal, and caches their
    operations together with their groups; without a new name, a later engine would send through groups that are gone.
    """
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"group {group.group_name}",))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; no copy."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor; collective for a distributed one."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distributed_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every rank has, cut like ``like``; communicates nothing."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """The ranges (start, stop) of the flattened parameter that this rank holds, all of one length; may be empty."""
    if not isinstance(tensor, DTensor) or isinstance(tensor.placements[0], Replicate):
        return [(0, tensor.numel())]
    (placement,) = tensor.placements
    assert isinstance(placement, Shard)
    size, width = tensor.shape[placement.dim], prod(tensor.shape[placement.dim + 1 :])
    block = -(-size // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * block, size)
    last = min(first + block, size)
    rows = range(prod(tensor.shape[: placement.dim])) if first < last else range(0)
    return [((row * size + first) * width, (row * size + last) * width) for row in rows]


def clip_mixed_(tensors: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over distributed and plain tensors together, which torch's refuses.

    Returns:
        The norm before clipping, 0-d, a plain tensor, equal on all ranks.
    """
    if norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type: {norm_type} is not one of 1, 2, inf")
    if not max_norm > 0:
        raise ValueError(f"max_norm: {max_norm} is not greater than 0")
    # By kind, since torch takes one kind in a call; a distributed norm is reduced, which all ranks do in this order.
    kinds: dict[bool, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.grad is not None:
            kinds.setdefault(isinstance(tensor, DTensor), []).append(tensor)
    norms = [
        whole(get_total_norm([tensor.grad for tensor in same if tensor.grad is not None], norm_type))
        for same in kinds.values()
    ]
    if not norms:
        return torch.zeros(())  # as torch.nn.utils.clip_grad_norm_ does
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if len(norms) > 1 else norms[0]
    for same in kinds.values():
        clip_grads_with_norm_(same, max_norm, norm)
    return norm
