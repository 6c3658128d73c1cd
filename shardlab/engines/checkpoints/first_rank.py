"""What a full state dict has beside the parameters: the first rank's, on every rank."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardlab.comm import Communicator, broadcast_coalesced
from shardlab.engines.checkpoints.together import share_texts, together

if TYPE_CHECKING:
    from shardlab.engines.base import Engine

_EXTRA_STATE = "_extra_state"  # how torch ends the name of what get_extra_state() returned; of any type, and any size


def first_ranks_own(engine: "Engine", state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the buffers and the extra state of the first data rank, the same on every rank; collective.

    Args:
        engine: whose state it is; its parameters are equal on all ranks already.
        state: copies, by name; the tensors among them are written to.

    Raises:
        RuntimeError: the first rank's extra state cannot be pickled; on all ranks.
    """
    parameters = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    others = {name: value for name, value in state.items() if name not in parameters}
    extra = {name for name, value in others.items() if name.endswith(_EXTRA_STATE) or not isinstance(value, Tensor)}
    buffers = [value for name, value in others.items() if name not in extra and value.numel()]
    for comm in reversed(engine.data_comms):
        broadcast_coalesced(comm, buffers, tag="buffers of rank 0")
    if not extra:
        return state
    return state | _of_first(engine.data_comms, engine.mesh.device, {name: state[name] for name in sorted(extra)})


def _of_first(comms: Sequence[Communicator], device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    """The first rank's ``values``, on every rank."""
    if all(comm.num_ranks == 1 for comm in comms):
        return values
    is_first = all(comm.rank == 0 for comm in comms)
    pickled = together(comms, device, lambda: _pickled(values) if is_first else "")
    found: dict[str, Any] = _unpickled(share_texts(comms, device, pickled)[0])
    return values if is_first else found


def _pickled(values: dict[str, Any]) -> str:
    file = io.BytesIO()
    torch.save(values, file)
    return base64.b64encode(file.getvalue()).decode()


def _unpickled(text: str) -> Any:
    # What a rank of this very run has written: any class of the user's own may be in it.
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)
