"""A workload's loss as a rank calls it: what it must not do is refused, and its first value is kept.

Is a loss a mean over what a rank's rows count, tokens say? Then the mean over ranks is not that of the whole batch.
Each rank notes the loss of its first micro-batch, when all ranks and strategies have the same parameters, and what that
loss may have divided by. If the single process's loss is the mean of the ranks' losses weighed by one of these numbers,
and not their plain mean, this is the cause (``told.losses.mean_of_means``). It is said only then.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.own_calls import OwnCallsRefused
from shardlab.experiment.run.rank_checks import FiniteCheck
from shardlab.experiment.trained.workload import LossFn

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
        with OwnCallsRefused(OWN_CALLS) as refused:
            self._watched = refused.watched
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
