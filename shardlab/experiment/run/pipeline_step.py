"""The training step of a rank that does a schedule's actions: the micro-batches of a step go through it together."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.trees import tensors_in
from shardlab.engines import Engine
from shardlab.experiment.run.train_step import StepResult, TrainStep, scalar, weighed
from shardlab.experiment.trained.pipelined import given_by, loss_of_output
from shardlab.pipeline import Pipeline
from shardlab.schedules import Action, Kind
from shardlab.vocabulary import MeshAxis, Phase, SpanKind

PHASES = {True: (Phase.FORWARD, SpanKind.FORWARD), False: (Phase.BACKWARD, SpanKind.BACKWARD)}
"""By whether an action is a forward."""


class PipelineStep(TrainStep):
    """Called once per micro-batch; the last call of a step does all of the rank's actions, then the optimizer's step.

    Each action is a span of its own, under its text, such as '2F0'. The loss of the last stage's ranks is told to all.

    Args:
        pipeline: of this rank.
        engine: around ``pipeline.module``.
        rest: see ``TrainStep``.
        named: likewise.
    """

    def __init__(self, pipeline: Pipeline, engine: Engine, *rest: Any, **named: Any) -> None:
        super().__init__(engine, *rest, **named)
        self._pipeline, self._stage = pipeline, engine
        self._shares: list[tuple[Any, float]] = []

    def __call__(self, batch: Any, weight: float = 1.0) -> StepResult | None:
        """As the base; a micro-batch waits until all of its step are there."""
        self._shares.append((batch, weight))
        if len(self._shares) < self.accumulation:
            return None
        given = [given_by(self.loss, one, self._stage.module) for one, _ in self._shares]
        with self._phase(Phase.BACKWARD):  # in which lent parameters' gradients come home, behind all actions
            mean = self._pipeline.run(
                self._stage, self._loss_of, given, self._shares, watch=self._watch, waits=self._waits,
            )  # fmt: skip
        self._losses.append(torch.zeros((), device=self._stage.mesh.device) if mean is None else mean)
        self._shares.clear()
        return self._update()

    @property
    def losses(self) -> list[Tensor]:
        """What the step holds so far: its micro-batches."""
        return [tensor for batch, _ in self._shares for tensor in tensors_in(batch)]

    def _loss_of(self, output: Tensor, share: tuple[Any, float]) -> Tensor:
        batch, weight = share
        return weighed(scalar(loss_of_output(self.loss, batch, self._stage.module, output)), weight)

    def _waits(self, action: Action) -> AbstractContextManager[None]:
        return self._phase(PHASES[action.kind is Kind.FORWARD][0])  # which messages have that are posted meanwhile

    def _watch(self, action: Action) -> AbstractContextManager[None]:
        phase, kind = PHASES[action.kind is Kind.FORWARD]
        return self._phase(phase, kind, str(action))

    def _mean_loss(self) -> tuple[float, float]:
        mean = torch.tensor(super()._mean_loss(), dtype=torch.float64, device=self._stage.mesh.device)
        schedule = self._pipeline.schedule
        with self._phase(Phase.METRICS):
            last = schedule.rank_of[schedule.num_stages - 1]
            self._stage.mesh[MeshAxis.PIPE].broadcast(mean, last, tag="loss of the last stage").wait()
        return float(mean[0]), float(mean[1])
