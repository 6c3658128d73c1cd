"""A workload's loss as a rank calls it: what it must not do is refused, and its first value is kept."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardlab.comm.own_calls import OwnCallsRefused
from shardlab.experiment.rank_checks import FiniteCheck
from shardlab.experiment.workload import LossFn

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
        counts: what the loss may have divided by, see ``token_mean``; empty for a built-in model.
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
