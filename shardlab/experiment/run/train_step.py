"""The training step, the same for every strategy."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from typing import Any, Protocol

import torch
from torch import Tensor

from shardlab.engines import AnyEngine
from shardlab.experiment.trained.workload import InPlaceOf, LossFn
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.vocabulary import Phase, SpanKind


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step.

    Attributes:
        loss: mean over ranks and micro-batches, before the step.
        grad_norm: global norm before clipping; NaN where it was neither clipped nor asked for.
        learning_rate: learning rate of this step.
        step: number of optimizer steps so far, from 1.
        own_loss: mean over the micro-batches of this rank alone.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    step: int
    own_loss: float


class Watches(Protocol):
    """What a step tells of itself, to a recorder or a plan."""

    def phase(self, phase: Phase, kind: SpanKind | None = None, unit: str = "") -> AbstractContextManager[None]:
        """Inside is a phase of the step; with ``kind`` a span of the whole model, and of a ``unit`` inside it."""

    def at_rest(self) -> object:
        """The optimizer has stepped, and gradients are still there."""


class TrainStep:
    """Called once per micro-batch; every ``accumulation``-th call ends with an optimizer step.

        train_step = TrainStep(engine, next_token, accumulation=4, max_norm=1.0)
        result = train_step((inputs, targets))      # None while accumulating, then a StepResult

    Args:
        engine: any strategy.
        loss: (model, batch) -> the mean loss of a micro-batch; ``model`` is called as the module is.
        accumulation: micro-batches of a step, at least 1.
        max_norm: clip the global gradient norm to this; None for no clipping.
        scheduler: an LR scheduler, stepped after each optimizer step.
        scaler: scales the loss for float16.
        recorder: records phases, and memory at rest.

    Raises:
        ValueError: ``accumulation`` is below 1.
    """

    def __init__(
        self, engine: AnyEngine, loss: LossFn, *, accumulation: int = 1, max_norm: float | None = None, scheduler:
        torch.optim.lr_scheduler.LRScheduler | None = None, scaler: GradScaler | None = None, recorder: Watches | None
        = None,
    ) -> None:  # fmt: skip
        if accumulation < 1:
            raise ValueError(f"accumulation: {accumulation} is below 1")
        self.engine, self.loss = engine, loss
        # A method may compute with parameters that only the engine can gather.
        self._model = InPlaceOf(engine.module, engine, lambda method: partial(engine.call, method))
        self.accumulation, self.max_norm = accumulation, max_norm
        self.scheduler, self.scaler, self.recorder = scheduler, scaler, recorder
        self.reports_norm = False
        """Whether the next step's result has the norm without clipping too, which costs a message and two passes."""
        self._losses: list[Tensor] = []

    def __call__(self, batch: Any, weight: float = 1.0) -> StepResult | None:
        """Train on one micro-batch of this rank's rows.

        Args:
            batch: what ``loss`` takes.
            weight: of its loss in the mean over ranks and micro-batches: 1, unless they have different numbers of rows,
                or of what the loss counts. A loss that weighs 0 may be NaN, as a mean of nothing is.

        Raises:
            ValueError: the loss is not a scalar that depends on parameters, or has called backward itself.
        """
        last = len(self._losses) == self.accumulation - 1
        with contextlib.nullcontext() if last else self.engine.no_sync():
            self._losses.append(self._forward_backward(batch, weight))
        return self._update() if last else None

    @property
    def losses(self) -> list[Tensor]:
        """Those of the micro-batches that await their optimizer step."""
        return self._losses

    def _forward_backward(self, batch: Any, weight: float) -> Tensor:
        before = self.engine.num_backwards
        with self._phase(Phase.FORWARD, SpanKind.FORWARD):
            loss = weighed(scalar(self.loss(self._model, batch)) / self.accumulation, weight)
        if self.engine.num_backwards > before:
            raise ValueError("loss: it has called backward, which is called of what it returns; leave that out")
        with self._phase(Phase.BACKWARD, SpanKind.BACKWARD):
            self.engine.backward(loss if self.scaler is None else self.scaler.scale(loss))
        # Detached, or the losses would hold the graphs of all micro-batches until the step ends.
        return loss.detach()

    def _update(self) -> StepResult:
        grad_norm: Tensor | float | None = None
        if self.scaler is not None:
            with self._phase(Phase.CLIP, SpanKind.OPTIMIZER):
                # Before clipping, whose norm is that of the true gradients.
                self.scaler.unscale_(self.engine)
        if self.max_norm is not None:
            with self._phase(Phase.CLIP, SpanKind.OPTIMIZER):
                grad_norm = self.engine.clip_grad_norm_(self.max_norm)
        elif self.reports_norm:
            with self._phase(Phase.METRICS):
                grad_norm = self.engine.clip_grad_norm_(inf)  # which scales by 1
                if grad_norm.is_cpu:  # or a tensor that is none of training would be held at the peak
                    grad_norm = float(grad_norm)
        # Before the scheduler changes it: the result says that of this step.
        learning_rate = self.engine.learning_rate
        with self._phase(Phase.STEP, SpanKind.OPTIMIZER):
            if self.scaler is None:
                self.engine.step()
            else:
                self.scaler.step(self.engine)
        if self.recorder is not None:
            # While the gradients are still there: a plan counts them as held at rest.
            self.recorder.at_rest()
        self.engine.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        # Last: it makes the host wait for the device, which by now has been given the whole step.
        loss, own = self._mean_loss()
        norm = nan if grad_norm is None else float(grad_norm)
        return StepResult(loss, norm, learning_rate, self.engine.num_steps, own)

    def _mean_loss(self) -> tuple[float, float]:
        """The mean loss over all ranks, and the mean loss of this rank."""
        with self._phase(Phase.METRICS):
            own = torch.stack(self._losses).sum().to(torch.float64)
            self._losses.clear()
            # A clone, as the mean is computed in place and this rank's own loss is needed too.
            return float(self.engine.mean_over_ranks(own.clone(), tag="loss")), float(own)

    def _phase(self, phase: Phase, kind: SpanKind | None = None, unit: str = "") -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.phase(phase, kind, unit)


def weighed(loss: Tensor, weight: float) -> Tensor:
    """A loss times its weight; one that weighs 0 may be NaN, as a mean of nothing is."""
    if weight == 0.0:
        return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)  # NaN * 0 would be NaN
    return loss if weight == 1.0 else loss * weight


def scalar(loss: Any) -> Tensor:
    """The loss, checked.

    Raises:
        ValueError: it is no scalar that depends on parameters.
    """
    if not isinstance(loss, Tensor):
        raise ValueError(f"loss: returned {type(loss).__name__}; it must return the mean loss as a tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss: returned a tensor of shape {list(loss.shape)} and {loss.dtype}; it must return one floating-point "
            "number, the mean over the rows"
        )
    if not loss.requires_grad:
        raise ValueError("loss: it does not depend on any parameter that trains; compute it from model(...)")
    return loss.reshape(())
