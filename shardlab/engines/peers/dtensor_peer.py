"""What the two engines of torch that keep parameters as ``DTensor`` share: ``torch_fsdp2`` and ``torch_tp``.

A ``DTensor`` is replicated, or cut along one dim into blocks of ceil(size / N), like ``partition.dim0``. A block along
dim 0 is one range of the flattened parameter; along another dim it is one range for each index before that dim. The
functions here also take a plain tensor, as a whole one; what is imported late is what makes tensors distributed.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardlab.engines.clip import check_clipping
from shardlab.engines.holdings import Holding
from shardlab.engines.peers.base import STATE_IS_TORCHS, Peer
from shardlab.partition.slices import TensorSlice, stretches
from shardlab.vocabulary import Role

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DTensorPeer(Peer):
    """A peer whose parameters, gradients and optimizer state are distributed tensors.

    Torch changes the module for good: ``close()`` cannot give the plain one back, ``full_state_dict()`` has its values.
    """

    no_checkpoints = STATE_IS_TORCHS

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As in ``Engine``; torch reduces the norm."""
        self.finish_gradients()
        with self._for("gradient norm"):
            return clip_mixed_(self.step_tensors(), max_norm, norm_type)

    def full_state_dict(self) -> dict[str, Any]:
        """As in ``Engine``; always collective."""
        # In the order of the state dict, which is the same on all ranks: each whole tensor is a collective of its own.
        with self._for("full parameters"):
            state = {
                name: whole(value) if isinstance(value, Tensor) else value
                for name, value in self.module.state_dict().items()
            }
        return self.checkpointer.first_ranks_own(self, state)  # type: ignore[no-any-return]

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict()`` or the plain module's ``state_dict()`` returned; communicates nothing."""
        own = self.module.state_dict()
        cut = {name: distributed_like(value, own[name]) if name in own else value for name, value in state.items()}
        self.module.load_state_dict(cut, strict=True)

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        with self._for("full gradients"):
            return {name: None if param.grad is None else whole(param.grad) for name, param in self.params.items()}

    def owned(self) -> dict[str, tuple[int, int]]:
        """Always refused: a piece may be many ranges; use ``holdings()``."""
        self._refuse_ranges("owned")

    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """Always refused: a piece may be many ranges; use ``holdings()``."""
        self._refuse_ranges("resident_params")

    def _refuse_ranges(self, method: str) -> NoReturn:
        raise NotImplementedError(f"{method}: a piece of strategy {self.name!r} may be many ranges; use holdings()")

    def _pieces(self, role: Role, tensor: Tensor, name: str) -> Iterator[Holding]:
        """One piece for each range of elements, if the tensor is distributed like its parameter."""
        own, param = local(tensor), self.params[name]
        if role is Role.OTHER or own.shape != local(param).shape:
            yield Holding(role, own)
            return
        spans = ranges(param)
        for span, part in zip(spans, own.reshape(-1).chunk(len(spans)) if spans else (), strict=True):
            yield Holding(role, part, name, span)


def device_mesh(group: dist.ProcessGroup, device_type: str) -> "DeviceMesh":
    """Torch's mesh of one axis over a group.

    The axis is named after the group. Torch takes meshes with the same ranks and names for equal, and caches their
    operations together with their groups; without a new name, a later engine would send through groups that are gone.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"group {group.group_name}",))


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor; no copy."""
    with torch.no_grad():
        own: Tensor = tensor.to_local() if is_distributed(tensor) else tensor.detach()
        return own


def whole(tensor: Any) -> Tensor:
    """A copy of the whole tensor; collective for a distributed one."""
    full: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
    return full.detach().clone()


def distributed_like(value: Tensor, like: Any) -> Tensor:
    """A whole tensor that every rank has, cut like ``like``; communicates nothing."""
    from torch.distributed.tensor import distribute_tensor

    if not is_distributed(like):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def ranges(tensor: Any) -> list[tuple[int, int]]:
    """The ranges (start, stop) of the flattened parameter that this rank holds, all of one length; may be empty."""
    if not is_distributed(tensor) or tensor.placements[0].is_replicate():
        return [(0, tensor.numel())]
    (placement,) = tensor.placements
    size, num_ranks, rank = tensor.shape[placement.dim], tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    block = -(-size // num_ranks)
    first, last = min(rank * block, size), min((rank + 1) * block, size)
    own = TensorSlice(tuple(tensor.shape), placement.dim, ((first, last),), rank, num_ranks)
    return list(stretches(own, 0, prod(own.shape)))


def clip_mixed_(tensors: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over distributed and plain tensors together, which torch's refuses.

    Returns:
        The norm before clipping, 0-d, a plain tensor, equal on all ranks.
    """
    check_clipping(max_norm, norm_type)
    # By kind, since torch takes one kind in a call; a distributed norm is reduced, which all ranks do in this order.
    kinds: dict[bool, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.grad is not None:
            kinds.setdefault(is_distributed(tensor), []).append(tensor)
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
