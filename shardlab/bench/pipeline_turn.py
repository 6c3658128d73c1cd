"""A step of a pipeline as a turn of the bench, ours or torch's: the same cut, table of actions, rows and optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.engines import Engine, build_engine
from shardlab.engines.peers.torch_pipeline import TorchPipeline
from shardlab.models import next_token_loss
from shardlab.pipeline import Pipeline
from shardlab.pipeline.stages import module_of
from shardlab.schedules import Schedule
from shardlab.trace.memory_by_role import LiveTensors, MemoryLedger
from shardlab.vocabulary import MeshAxis, Role

WARM_UPS = 3


class PipelineTurn:
    """A rank's stages with their optimizer and the whole batch.

    Args:
        model: the whole.
        mesh: with the axis ``pipe`` and one data rank.
        schedule: a row is a micro-batch.
        tokens: of the batch, [micro-batches, seq_len + 1].
        optimizer_fn: of what a rank steps.
        is_torchs: whether torch's runtime does the schedule.
    """

    def __init__(
        self, model: nn.Module, mesh: BaseMesh, schedule: Schedule, tokens: Tensor, optimizer_fn:
        Callable[[Any], torch.optim.Optimizer], *, is_torchs: bool,
    ) -> None:  # fmt: skip
        self._mesh, pipeline = mesh, Pipeline(model, schedule, mesh)
        self._optimizer: Any
        self._rows = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.engine: Engine | None = None
        if is_torchs:
            place = mesh[MeshAxis.PIPE].rank
            stages = {
                stage: module_of(model, {stage: parts})
                for stage, parts in enumerate(pipeline.cut) if schedule.rank_of[stage] == place
            }  # fmt: skip
            number, actions = schedule.num_micro_batches, schedule.to_csv()
            theirs = TorchPipeline(stages, schedule.num_stages, actions, number, next_token_loss, mesh)
            self._params = list(pipeline.module.parameters())
            self._optimizer = optimizer_fn(self._params)
            self._run: Callable[[], object] = lambda: theirs.run(*self._rows)
            return
        engine = build_engine("ddp", pipeline.module, optimizer_fn, mesh)
        assert isinstance(engine, Engine)
        self.engine, self._optimizer = engine, engine
        self._run = lambda: pipeline.run(engine, next_token_loss, *self._rows)

    def warm_up(self) -> None:
        """Run the steps that do not count."""
        for _ in range(WARM_UPS):
            self.step()

    def step(self) -> None:
        """Run a whole training step; return when the device is done."""
        self._run()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)

    def peak_bytes(self) -> int:
        """Run a step and return its highest live bytes; nothing else may be alive on the device."""
        if self._mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._mesh.device)
            self.step()
            return torch.cuda.max_memory_allocated(self._mesh.device)
        ledger = MemoryLedger(self._live())
        with self._mesh.observed_by(ledger), ledger:
            self.step()
        return ledger.peak().num_bytes

    def _live(self) -> LiveTensors:
        if self.engine is not None:
            return self.engine.live_tensors()
        state = [value for kept in self._optimizer.state.values() for value in kept.values()]
        return {Role.PARAMETER: self._params, Role.OPTIMIZER_STATE: [one for one in state if isinstance(one, Tensor)]}

    def close(self) -> None:
        """Let go of the module."""
        if self.engine is not None:
            self.engine.close()
