"""Telling "no rank used this parameter" from "the gradient is zero", without a message.

One process leaves ``p.grad`` None for a parameter no micro-batch used, and the optimizer skips it: no weight decay, no
momentum. Several ranks must agree on that, and a rank alone cannot know. Here the sum itself carries the answer, in
the sign of zero (IEEE 754, section 6.3): a sum is -0 only if every term is -0.

* A rank that did not use the parameter sends -0 in each of its elements.
* A rank that used it sends its gradient plus +0, which turns every -0 into +0 and changes nothing else; at least the
  elements that somebody will look at.

After the reduction such an element is -0 if and only if no rank used the parameter; any one tells.
"""

from collections.abc import Sequence
from math import copysign

import torch
from torch import Tensor


def write_used(slot: Tensor, gradient: Tensor) -> None:
    """Copy a gradient into its slot, every -0 as +0."""
    torch.add(gradient, 0.0, out=slot)


def mark_used(element: Tensor) -> None:
    """The same for a gradient that lies where it is reduced, of which only this element will be looked at."""
    element.add_(0.0)


def mark_all_used(buffer: Tensor, places: Sequence[int]) -> None:
    """The same for gradients that lie in a one-dimensional buffer, of which only these elements will be looked at."""
    indices = torch.tensor(places, dtype=torch.int64, device=buffer.device)
    buffer.index_add_(0, indices, buffer.new_zeros(1).expand(len(places)))


def write_unused(slot: Tensor) -> None:
    """Fill the slot with -0."""
    slot.fill_(-0.0)


def nobody_used(reduced: Tensor) -> bool:
    """Whether the first element of a reduced, not yet divided tensor says that no rank used the parameter."""
    if reduced.numel() == 0:
        return False
    first = float(reduced[(0,) * reduced.dim()])
    return first == 0.0 and copysign(1.0, first) < 0.0
