"""The module's full state dict, the same on every rank: from any engine, and into any engine.

Parameters are equal on all ranks. Buffers and extra state need not be, so the first data rank's are sent to the others.
"""

import base64
import contextlib
import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm.coalesced import broadcast_coalesced
from shardlab.comm.communicator import Communicator
from shardlab.comm.same_on_all_ranks import all_or_none, share_texts
from shardlab.comm.signed_messages import checked, signed
from shardlab.comm.slices import cut_state, merge_state
from shardlab.engines.any_engine import AnyEngine

_EXTRA_STATE = "_extra_state"  # torch's suffix for what get_extra_state() returned: any type, of any size


def full_state_dict(engine: AnyEngine) -> dict[str, Any]:
    """See ``Engine.full_state_dict``; the module must have its full parameters, or its slices of them."""
    state = engine.module.state_dict()
    if engine.tensor_comm is not None:
        whole = merge_state(state, engine.slices, engine.tensor_comm)
    else:
        # Copies: the module's own tensors change with the next step, and the broadcast would write to them.
        whole = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}
    return _like(state, first_ranks_own(engine, whole))


def load_full_state_dict(engine: AnyEngine, state: Mapping[str, Any]) -> None:
    """See ``Engine.load_full_state_dict``; the module must have full parameters, or its slices of them."""
    given = _like(state, cut_state(state, engine.slices))
    own = engine.module.state_dict()
    all_fits = all(_fits(own.get(name), given.get(name)) for name in own.keys() | given.keys())
    # Torch copies what fits before it refuses the rest; or it accepts the rest, as modules may rename or add keys.
    with contextlib.nullcontext() if all_fits else _restored_after_an_error(engine.module, own):
        engine.module.load_state_dict(given, strict=True)


@contextlib.contextmanager
def _restored_after_an_error(module: nn.Module, own: Mapping[str, Any]) -> Iterator[None]:
    tensors = {name: (value, value.clone()) for name, value in own.items() if isinstance(value, Tensor)}
    try:
        yield
    except Exception:
        for value, before in tensors.values():
            value.copy_(before)
        for name in own.keys() - tensors.keys():  # extra state
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(own[name])
        raise


def first_ranks_own(engine: AnyEngine, state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the buffers and the extra state of the first data rank, the same on every rank; collective.

    Args:
        engine: the owner of the state; its parameters are equal on all ranks.
        state: copies, by name; the broadcast writes to tensors among them.

    Raises:
        RuntimeError: the first rank's extra state cannot be pickled; on all ranks.
    """
    # Parameters are not sent: every engine keeps them equal, and they are most of the bytes.
    parameters = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    others = {name: value for name, value in state.items() if name not in parameters}
    extra = {name for name, value in others.items() if name.endswith(_EXTRA_STATE) or not isinstance(value, Tensor)}
    buffers = [value for name, value in others.items() if name not in extra and value.numel()]
    # Inner axis first: then the first rank of an outer axis sends on what it has just received.
    for comm in reversed(engine.data_comms):
        broadcast_coalesced(comm, buffers, tag="buffers of rank 0")
    if not extra:
        return state
    return state | _of_first(engine.data_comms, engine.mesh.device, {name: state[name] for name in sorted(extra)})


def _like(state: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with the versions of modules that torch has noted at ``state``: some modules convert old states."""
    made = OrderedDict(values)
    if (metadata := getattr(state, "_metadata", None)) is not None:
        made._metadata = metadata  # type: ignore[attr-defined]
    return made


def _fits(own: Any, given: Any) -> bool:
    if isinstance(own, Tensor) and isinstance(given, Tensor):
        return own.shape == given.shape
    return own is not None and given is not None


def _of_first(comms: Sequence[Communicator], device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    """The first rank's ``values``, on every rank."""
    if all(comm.num_ranks == 1 for comm in comms):
        return values
    is_first = all(comm.rank == 0 for comm in comms)
    pickled = all_or_none(comms, device, lambda: _pickled(values) if is_first else "")
    found: dict[str, Any] = _unpickled(share_texts(comms, device, pickled)[0])
    return values if is_first else found


def _pickled(values: dict[str, Any]) -> str:
    file = io.BytesIO()
    torch.save(values, file)
    return base64.b64encode(signed(_EXTRA_STATE, file.getvalue())).decode()


def _unpickled(text: str) -> Any:
    # It may hold any class of the user's; its signature says that a rank wrote it.
    return torch.load(io.BytesIO(checked(_EXTRA_STATE, base64.b64decode(text))), weights_only=False)
