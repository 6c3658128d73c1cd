"""What each rank checks of its own: its buffers, whether its numbers are numbers, and what its loss does.

Buffers: which does a rank compute from its own rows, as a vector quantisation its codebook? With such a buffer, ranks
that share a batch compute something else than one process, and all is right. BatchNorm's are not among them: its
statistics do not change the loss of training, and the layer itself is named (``manifest.differences_by_rank``).

Numbers: after a reduction a NaN of one rank is in the mean of all. So each rank checks its own numbers before any
reduction: the loss of its own rows, and one of its gradients. A NaN anywhere in a backward spreads towards the input,
so it is enough to check the gradient of the module's first trainable parameter, which is among the last to be computed.
This costs one sum over that gradient per backward.

Loss: what it must not do is refused, and its first value is kept. Is it a mean over what a rank's rows count, tokens
say? Then the mean over ranks is not that of the whole batch. Each rank notes the loss of its first micro-batch, when
all ranks and strategies have the same parameters, and what that loss may have divided by. If the single process's loss
is the mean of the ranks' losses weighed by one of these numbers, and not their plain mean, this is the cause
(``told.losses.mean_of_means``). It is said only then.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.comm.callers import own_calls_refused
from shardlab.comm.trees import tensors_in
from shardlab.experiment.trained.batches import checksum, is_plain
from shardlab.experiment.trained.workload import LossFn

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


OWN_CALLS = (
    "loss: it calls torch.distributed by itself, for which one process that trains alone would wait; let it take the "
    "mesh too, loss(model, batch, mesh), and send over it, as with "
    "shardlab.comm.autograd_collectives.all_gather(features, mesh.data, 0)"
)


@dataclass(frozen=True)
class FirstLoss:
    """Of a rank's first micro-batch.

    Attributes:
        loss: of its rows.
        weight: of that in the mean over ranks.
        counts: what the loss may have divided by, see ``counts_of``; empty for a built-in model.
    """

    loss: float
    weight: float
    counts: dict[str, float]


class WatchedLoss:
    """The loss of (model, batch).

    Args:
        loss: of the workload.
        finite: looks at the rows of a loss that is inf or NaN.

    Attributes:
        first: its first value, None before.
    """

    def __init__(self, loss: LossFn, finite: FiniteCheck) -> None:
        self.first: Tensor | float | None = None
        self._loss, self._finite = loss, finite
        self._watched: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    @contextlib.contextmanager
    def sends_over_its_mesh(self) -> Iterator[None]:
        """Inside, a loss that calls torch.distributed by itself raises."""
        with own_calls_refused(OWN_CALLS) as self._watched:
            yield

    def __call__(self, model: Any, batch: Any) -> Any:
        """What the workload's loss returns."""
        with self._watched():
            loss = self._loss(model, batch)
        self._finite.computed(loss, batch)
        if self.first is None and isinstance(loss, Tensor) and loss.numel() == 1:
            # On a GPU the host does not wait for it; a tensor on the CPU would count as held after a step.
            self.first = loss.detach().clone() if loss.is_cuda else float(loss.detach())
        return loss


IGNORED = -100  # a target that torch's losses leave out


def counts_of(batch: Any) -> dict[str, float]:
    """What a loss may have divided by on these rows, by the expression of ``batch`` that gives it."""
    found: dict[str, float] = {}
    for name, tensor in _tensors(batch, "batch"):
        if tensor.dim() == 0 or tensor.is_complex():
            continue
        tensor = tensor.detach()  # inputs may ask for gradients
        found[f"len({name})"] = len(tensor)
        # A model of text leaves out the first token of a row, which nothing foretells.
        for words, part in ((name, tensor), *([(f"{name}[:, 1:]", tensor[:, 1:])] if tensor.dim() == 2 else [])):
            if tensor.is_floating_point():
                found |= {f"{words}.sum()": float(part.sum(dtype=torch.float64))} if tensor.dim() < 3 else {}
            else:
                found[f"({words} != {IGNORED}).sum()"] = int((part != IGNORED).sum())
                found[f"({words} != 0).sum()"] = int((part != 0).sum())
    return found


def _tensors(nest: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(nest, Tensor):
        yield name, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _tensors(value, f"{name}[{key!r}]")
    elif isinstance(nest, list | tuple):
        for place, value in enumerate(nest):
            yield from _tensors(value, f"{name}[{place}]")
