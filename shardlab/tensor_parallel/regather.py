"""A linear layer that keeps a part of its input for backward, and gathers the whole again there.

With sequence parallelism the input of a column-parallel layer is the only large activation that is whole on every rank.
Autograd keeps it for the weight's gradient: 2sbh bytes of 16-bit values in front of attention, as much in front of the
MLP. Kept as a part it is 2sbh/N, for one more all-gather in backward. Columns that share an entrance share that too.
Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2 (the end).

Legend: b micro-batch, s sequence, h hidden, N ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardlab.tensor_parallel.entrance import Entrance


def linear_of_gathered(
    gathered: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, entrance: Entrance
) -> Tensor:
    """``gathered @ weight.T + bias``; what is kept of ``gathered`` is ``part``.

    Args:
        gathered: what ``entrance`` made of ``part``.
        part: this rank's part along the entrance's dim.
        weight: (out, in).
        bias: (out,) or None.
        entrance: which both came through.
    """
    result: Tensor = _LinearOfGathered.apply(gathered, part.detach(), weight, bias, entrance)  # type: ignore[no-untyped-call]
    return result


class _LinearOfGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gathered: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, entrance: Entrance
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.entrance = entrance
        return functional.linear(gathered, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_input, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        d_weight = d_bias = d_input = None
        if needs_weight:
            d_weight = rows.T @ ctx.entrance.again(part, for_all=needs_input).flatten(0, -2)
        if needs_bias:
            d_bias = rows.sum(0)
        if needs_input:
            d_input = gradient @ weight
        return d_input, None, d_weight, d_bias, None
