"""A mode of torch that stays on in backward, where a checkpoint runs forward again."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode


def backward_in(
    mode: TorchFunctionMode, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None,
    create_graph: bool = False, inputs: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """``loss.backward()``, for a mode that is handling it; the arguments are those of ``Tensor.backward``."""
    # While a mode handles a function torch has it off, and hands it every function of tensors. Of an edge it is none.
    TorchFunctionMode.__enter__(mode)
    try:
        edges = None if inputs is None else [get_gradient_edge(one) for one in inputs]
        torch.autograd.backward(get_gradient_edge(loss), gradient, retain_graph, create_graph, inputs=edges)
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)
