"""What each rank checks of its own: its buffers, and whether its numbers are numbers.

Buffers: which does a rank compute from its own rows, as a vector quantisation its codebook? With such a buffer, ranks
that share a batch compute something else than one process, and all is right. BatchNorm's are not among them: its
statistics do not change the loss of training, and the layer itself is named (``manifest.differences_by_rank``).

Numbers: after a reduction a NaN of one rank is in the mean of all. So each rank checks its own numbers before any
reduction: the loss of its own rows, and one of its gradients. A NaN anywhere in a backward spreads towards the input,
so it is enough to check the gradient of the module's first trainable parameter, which is among the last to be computed.
This costs one sum over that gradient per backward.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.comm.trees import tensors_in
from shardlab.experiment.trained.batches import checksum, is_plain

Sums = Mapping[int, Mapping[str, int]]
_NAMED = 3  # buffers, in a sentence


def sums_of(module: nn.Module) -> dict[str, int]:
    """The checksum of each buffer on this rank."""
    modules = ((name, each) for name, each in module.named_modules() if not isinstance(each, _BatchNorm))
    buffers = (pair for name, each in modules for pair in each.named_buffers(name, recurse=False))
    own = ((name, getattr(buffer, "_local_tensor", buffer)) for name, buffer in buffers)
    return {name: checksum(buffer.cpu()[None]) for name, buffer in own if not buffer.is_meta and is_plain(buffer)}


def first_that_differ(by_rank: Sequence[Sums], num_tensor_ranks: int) -> str:
    """The first step after which data ranks have other buffers, in words; empty if there is none.

    Args:
        by_rank: of each rank, after some steps, its ``sums_of``.
        num_tensor_ranks: ranks of the tensor axis, which hold other slices.
    """
    same_slices = [by_rank[first::num_tensor_ranks] for first in range(num_tensor_ranks)]
    for step, known in by_rank[0].items():
        names = [name for name in known if any(len({each[step][name] for each in ranks}) > 1 for ranks in same_slices)]
        if names:
            differ = f"{_buffers(names)} {'differs' if len(names) == 1 else 'differ'}"
            return f"{differ} between ranks after step {step}, as what is computed from a rank's own rows does"
    return ""


def broadcast_said(first_rank: Sums) -> str:
    """Which buffers change in training, in words, where all ranks get the first one's; empty if there is none."""
    steps = list(first_rank.values())
    names = [name for name in steps[0] if len({step[name] for step in steps}) > 1]
    return f"all ranks have the first one's {_buffers(names)} (broadcast_buffers)" if names else ""


def _buffers(names: Sequence[str]) -> str:
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{'buffer' if len(names) == 1 else 'buffers'} {named}"


DATA, LOSS, GRADIENTS = "data", "loss", "gradients"


class FiniteCheck:
    """Of one rank: in which step its own loss, and its own gradients, were first inf or NaN.

    Args:
        params: of the module, in its order; None for no look at gradients, because a scaler expects some to overflow.

    Attributes:
        lost: the first such step, by ``DATA``, ``LOSS`` and ``GRADIENTS``; empty while all is well.
    """

    def __init__(self, params: Iterable[nn.Parameter] | None) -> None:
        self.lost: dict[str, int] = {}
        self._sums: list[Tensor | float] = []
        self._is_in_data = False
        first = next((param for param in params or () if param.requires_grad), None)
        # Called with the gradient as backward has computed it, before an engine's own hook takes it away.
        self._hook = None if first is None else first.register_hook(self._look)

    def computed(self, loss: Any, batch: Any) -> None:
        """A loss on the CPU; of one that is inf or NaN the rows are looked at."""
        if isinstance(loss, Tensor) and loss.is_cpu and not loss.detach().isfinite().all():
            tensors = [tensor for tensor in tensors_in(batch) if is_plain(tensor)]
            self._is_in_data |= not all(bool(tensor.isfinite().all()) for tensor in tensors)

    def ended(self, step: int, own_loss: float) -> None:
        """A step has ended; ``own_loss`` is that of this rank's rows."""
        sums, self._sums = self._sums, []
        # Read only now: on a GPU the host has waited for the loss already.
        if not all(isfinite(each) for each in sums):
            self.lost.setdefault(GRADIENTS, step)
        if self._is_in_data:
            self.lost.setdefault(DATA, step)
        if not isfinite(own_loss):
            self.lost.setdefault(LOSS, step)

    def remove(self) -> None:
        """Look at no gradient any more."""
        if self._hook is not None:
            self._hook.remove()

    def _look(self, gradient: Tensor | None) -> None:
        if gradient is None:  # of a weight whose gradient comes later, by an action of its own
            return
        # Of a DTensor take only this rank's shard: a sum over the whole tensor would need communication.
        own: Tensor = getattr(gradient, "_local_tensor", gradient)
        # Sum in float32 at least: a 16-bit sum may overflow although every element is finite.
        total = own.detach().sum(dtype=torch.promote_types(own.dtype, torch.float32))
        # A number and no tensor on the CPU, where what is held after a step is counted to the byte.
        self._sums.append(total if total.is_cuda else float(total))
