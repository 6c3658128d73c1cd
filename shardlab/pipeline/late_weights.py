"""Backward in two halves: linear layers whose weights' gradients wait, and all else at once.

Inside ``late_weights`` a linear layer's backward brings the gradient of its input alone, and notes what the weight's
is made of: its input and the gradient of its output. ``edges_and_gradients`` multiplies them, later, and a backward
hands the products to the parameters themselves, so that hooks on gradients run; in the first half they are called
with None. Gradients of biases, norms and embeddings, a small part of the work, come with the first half.
Source: Qi et al., arXiv 2401.10241, section 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardlab.comm.modes_in_backward import BACKWARDS, backward_in

Late = list[tuple[GradientEdge, Tensor, Tensor]]
"""Of linear layers, in the order of backward: where the weight's gradient belongs, input, gradient of the output."""


class _LateLinear(torch.autograd.Function):
    runs_no_backward = True  # for engines that ask what a backward will reach

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, edge: GradientEdge, late: Late) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.edge, ctx.late = edge, late
        return functional.linear(given, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        # Detached: what led to it would hold the list that holds it, until cycles are collected.
        ctx.late.append((ctx.edge, given.detach(), gradients[0]))
        return (gradients[0] @ weight if ctx.needs_input_grad[0] else None), None, None, None


class late_weights(TorchFunctionMode):  # noqa: N801, used as a function: ``with late_weights(late):``
    """Inside, linear layers leave their weights' gradients to ``late``."""

    def __init__(self, late: Late) -> None:
        super().__init__()
        self._late = late

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As it is, but for linear layers, also of a checkpoint in backward."""
        if func in BACKWARDS:
            return backward_in(self, *args, **(kwargs or {}))
        return (self._linear if func is functional.linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Without a backward there is nothing to leave, and in inference mode nowhere to ask where it belongs.
        if not (weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()):
            return functional.linear(input, weight, bias)
        # Asked for now: when backward comes, the engine may have sharded the parameter, which then refuses to be used.
        edge = get_gradient_edge(weight)
        output: Tensor = _LateLinear.apply(input, weight, edge, self._late)  # type: ignore[no-untyped-call]
        return output if bias is None else output + bias


def edges_and_gradients(late: Late) -> tuple[list[GradientEdge], list[Tensor]]:
    """With which the second half begins: where the weights' gradients belong, and themselves."""
    rows = ((torch.atleast_2d(one).flatten(0, -2) for one in pair) for _, *pair in late)
    return [edge for edge, _, _ in late], [gradient.T @ given for given, gradient in rows]
