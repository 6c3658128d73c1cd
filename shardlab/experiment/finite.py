"""On which rank numbers stopped being numbers: after a reduction a NaN of one rank is in the mean of all.

So each rank checks its own numbers before any reduction: the loss of its own rows, and one of its gradients. A NaN
anywhere in a backward spreads towards the input, so it is enough to check the gradient of the module's first trainable
parameter, which is among the last to be computed. This costs one sum over that gradient per backward.
"""

from collections.abc import Iterable
from math import isfinite

import torch
from torch import Tensor, nn

LOSS, GRADIENTS = "loss", "gradients"


class FiniteCheck:
    """Of one rank: in which step its own loss, and its own gradients, were first inf or NaN.

    Args:
        params: of the module, in its order; None for no look at gradients, because a scaler expects some to overflow.

    Attributes:
        lost: the first such step, by ``LOSS`` and ``GRADIENTS``; empty while all is well.
    """

    def __init__(self, params: Iterable[nn.Parameter] | None) -> None:
        self.lost: dict[str, int] = {}
        self._sums: list[Tensor | float] = []
        first = next((param for param in params or () if param.requires_grad), None)
        # Called with the gradient as backward has computed it, before an engine's own hook takes it away.
        self._hook = None if first is None else first.register_hook(self._look)

    def ended(self, step: int, own_loss: float) -> None:
        """A step has ended; ``own_loss`` is that of this rank's rows."""
        sums, self._sums = self._sums, []
        # Read only now: on a GPU the host has waited for the loss already.
        if not all(isfinite(each) for each in sums):
            self.lost.setdefault(GRADIENTS, step)
        if not isfinite(own_loss):
            self.lost.setdefault(LOSS, step)

    def remove(self) -> None:
        """Look at no gradient any more."""
        if self._hook is not None:
            self._hook.remove()

    def _look(self, gradient: Tensor) -> None:
        # Of a DTensor take only this rank's shard: a sum over the whole tensor would need communication.
        own: Tensor = getattr(gradient, "_local_tensor", gradient)
        # Sum in float32 at least: a 16-bit sum may overflow although every element is finite.
        total = own.detach().sum(dtype=torch.promote_types(own.dtype, torch.float32))
        # A number and no tensor on the CPU, where what is held after a step is counted to the byte.
        self._sums.append(total if total.is_cuda else float(total))
