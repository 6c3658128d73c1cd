"""Telling "no rank used this parameter" from "the gradient is zero", without an extra message.

One process leaves ``p.grad`` None for a parameter that no micro-batch used, and the optimizer skips it: no weight
decay, no momentum. Several ranks must agree on that, and no rank knows alone. Here the sum itself carries the answer,
in the sign of zero (IEEE 754, section 6.3): a sum is -0 only if every term is -0.

* A rank that did not use the parameter sends -0 in each of its elements.
* A rank that used it sends no -0, at least not in the elements that some rank will look at: it adds +0 to them.

After the reduction such an element is -0 if and only if no rank used the parameter; one element is enough. This needs:

* +0 is added last, to exactly what is sent: in the dtype of the reduction, after the cast to it and after the factor
  1/N, since either can turn a small negative number into -0;
* the sum must not round to -0. It does not: a sum of numbers of one dtype is a multiple of its smallest subnormal, so
  it is exactly 0 or not 0 at all, and a sum that cancels to exactly 0 is +0. Summing 16-bit numbers in float32 and
  rounding the result does not change that; nor does a second axis that sums the sums;
* the answer is read before the sum is cast or divided;
* whoever adds keeps the sign, as all processors do. A switch need not: NCCL is tried before it is used
  (``comm.transports.nccl.require_signed_zeros``).

``torch.set_flush_denormal(True)`` breaks the second, where the first element of a gradient is a sum below
``smallest_normal``: it becomes 0 with the result's sign, and the parameter counts as unused.
"""

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from math import copysign
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
_ALIKE = ContextVar("all ranks use the same parameters", default=False)


@contextlib.contextmanager
def ranks_alike() -> Iterator[None]:
    """Inside, no rank uses what this one does not: the others are not there, and their sums are not."""
    token = _ALIKE.set(True)
    try:
        yield
    finally:
        _ALIKE.reset(token)


def mark_used(element: Tensor) -> None:
    """Mark a gradient as used, where it is reduced; ``element`` is the only element that will be looked at."""
    element.add_(0.0)


def mark_all_used(elements: list[Tensor]) -> None:
    """Mark gradients of one dtype as used; ``elements``, [1] each, are those that will be looked at."""
    if not elements:
        return
    # Of all at once; not by their indices, for whose copy to the device the host would wait.
    torch._foreach_add_(elements, 0.0)


def write_unused(slot: Tensor) -> None:
    """Fill a slot with -0: this rank did not use the parameter."""
    slot.fill_(-0.0)


def nobody_used(reduced: Mapping[Key, Tensor]) -> set[Key]:
    """The parameters that no rank used, as the first elements of their reduced, not yet divided tensors say.

    On a GPU this waits for the device, so it is asked once for many, and only about what this rank did not use.
    """
    filled = {key: tensor for key, tensor in reduced.items() if tensor.numel()}
    firsts = {key: tensor[(slice(0, 1),) * tensor.dim()].reshape(1) for key, tensor in filled.items()}
    if not firsts:
        return set()
    values = torch.cat(list(firsts.values())).tolist()
    alike = _ALIKE.get()
    return {
        key for key, first in zip(firsts, values, strict=True) if alike or (first == 0.0 and copysign(1.0, first) < 0.0)
    }
