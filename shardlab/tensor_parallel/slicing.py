"""From full parameters to this rank's slices of them, and back: what all parallel layers do, and the state dict."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardlab.comm import Communicator, broadcast_coalesced
from shardlab.comm.slices import cut, cut_state, merge_state
from shardlab.partition.slices import TensorSlice, slices_of


def equalise(module: nn.Module, comm: Communicator, name: str) -> None:
    """Make a layer's parameters those of the axis' first rank, in place; blocking.

    Raises:
        ValueError: a parameter has no memory.
    """
    if meta := [key for key, param in module.named_parameters() if param.is_meta]:
        raise ValueError(f"{name}: {meta[0]!r} is on the meta device; parallelize_module makes such layers itself")
    # Before it is cut: ranks may have drawn different weights, and slices of different layers make no layer.
    broadcast_coalesced(comm, module.parameters(), tag=f"parameters of {name} from rank 0")


def sliced(param: Tensor, slice_: TensorSlice) -> nn.Parameter:
    """A new parameter that holds this rank's slice only."""
    return nn.Parameter(cut(param, slice_), requires_grad=param.requires_grad)


def require_width(layer: str, field: str, x: Tensor, width: int, num_ranks: int) -> None:
    """Refuse an input whose last dim is not ``width``; the error says if it is a part, or the whole, of what is needed.

    Raises:
        ValueError: it is not, or the input is a nested tensor.
    """
    if x.is_nested:
        raise ValueError(
            f"{layer}: the input is a nested tensor, which has no sizes to divide; pad it (nn.TransformerEncoder makes "
            "one of a padding mask in evaluation: build it with enable_nested_tensor=False)"
        )
    found = x.shape[-1] if x.dim() else 0
    if found == width:
        return
    hint = ""
    if found * num_ranks == width:
        hint = f": this is one of {num_ranks} parts; use gather_output=True in the layer before"
    elif found == width * num_ranks:
        hint = ": this is the whole of it; use input_is_parallel=False"
    raise ValueError(f"{layer}: the input has {found} {field}; {width} are needed{hint}")


def merge_state_dict(model: nn.Module, comm: Communicator) -> dict[str, Any]:
    """A copy of the whole state, the same on every rank, which the plain model loads with strict=True; collective."""
    return merge_state(model.state_dict(), slices_of(model), comm)


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the plain model's state: each rank copies its slices. Nothing is sent.

    Raises:
        RuntimeError: names differ, or shapes of what is no slice; torch names them.
        ValueError: a parameter has another shape than the full one.
    """
    model.load_state_dict(cut_state(state, slices_of(model)), strict=True)
