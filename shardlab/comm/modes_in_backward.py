"""A mode of torch that stays on in backward, where a checkpoint runs forward again."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

Tensors = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
BACKWARDS = (Tensor.backward, torch.autograd.backward)


def _listed(tensors: Tensors) -> Iterable[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return tensors.values() if isinstance(tensors, Mapping) else tensors


def backward_in(
    mode: TorchFunctionMode, losses: Tensors, grad_tensors: Tensor | Sequence[Tensor] | None = None,
    retain_graph: bool | None = None, create_graph: bool = False, inputs: Tensors | None = None,
    gradient: Tensor | None = None,
) -> None:  # fmt: skip
    """What is one of ``BACKWARDS``, for a mode that is handling it; the arguments are theirs."""
    # While a mode handles a function torch has it off, and hands it all functions of tensors. Of edges this is none.
    ends = [get_gradient_edge(one) for one in _listed(losses)]
    starts = None if inputs is None else [get_gradient_edge(one) for one in _listed(inputs)]
    given = grad_tensors if gradient is None else gradient
    TorchFunctionMode.__enter__(mode)
    try:
        torch.autograd.backward(ends, given, retain_graph, create_graph, inputs=starts)
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)
