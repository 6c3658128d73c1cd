"""A mode of torch that stays on in backward, where a checkpoint runs forward again; and hooks that stay out of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
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


@contextmanager
def lone_hooks_out(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, autograd calls no hook of a parameter that has just one; a user's and that beside it stay."""
    # Private: torch has no other way to leave hooks out for a while. (With guards a sharded parameter is of another
    # class, and would not be asked.)
    plain = [param for param in params if type(param) is nn.Parameter]
    taken = [(param, hooks) for param in plain if (hooks := param._backward_hooks) and len(hooks) == 1]
    for param, _ in taken:
        param._backward_hooks = None
    try:
        yield
    finally:
        for param, hooks in taken:
            if param._backward_hooks is None:
                param._backward_hooks = hooks
            else:  # a forward has registered one
                param._backward_hooks.update(hooks)
