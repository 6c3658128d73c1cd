"""What this rank holds of torch's distributed tensors, in our words: pieces, ranges, whole tensors.

A ``DTensor`` is cut along one dim into blocks of ceil(size / N), like ``partition.dim0``, or is replicated. Only a cut
along dim 0 is one range of the flattened parameter; along another dim it is one range for each index before that dim.
Everything here also takes a plain tensor, which is a whole one.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardlab.engines.clip import NORM_TYPES


def device_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Torch's mesh of one axis over a group.

    The axis is named after the group: torch takes meshes of the same ranks and names for one and keeps what it has
    learned of their operations, with the groups, so a later engine would send through groups that are long gone.
    """
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"group {group.group_name}",))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it; no copy."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it; collective for a distributed tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distributed_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every rank has, cut as ``like`` is; communicates nothing."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of one parameter, as this rank holds it."""
    return {key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """The elements (start, stop) of the flattened parameter that this rank holds, equally long; none for none."""
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
    """``torch.nn.utils.clip_grad_norm_`` over distributed and plain tensors together, which torch refuses.

    Returns:
        The norm before clipping, 0-d, a plain tensor, equal on all ranks.
    """
    if norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type: {norm_type} is not one of 1, 2, inf")
    if not max_norm > 0:
        raise ValueError(f"max_norm: {max_norm} is not greater than 0")
    kinds: dict[bool, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.grad is not None:
            kinds.setdefault(isinstance(tensor, DTensor), []).append(tensor)
    norms = [
        whole(get_total_norm([tensor.grad for tensor in same if tensor.grad is not None], norm_type))
        for same in kinds.values()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if len(norms) > 1 else norms[0]
    for same in kinds.values():
        clip_grads_with_norm_(same, max_norm, norm)
    return norm
