"""Torch's own pipeline runtime on the ranks of an axis, which does the same table of actions as ours.

What travels between stages is the same, (p v - 1) m messages each way; the first step sends besides what outputs are
like. Each stage is a module of its own; gradients add up in the parameters, and are those of the mean loss.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

# Private: torch's public schedules are classes of their own, and none takes a table of actions.
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from shardlab.comm import BaseMesh
from shardlab.comm.torch_engine_groups import torch_group
from shardlab.vocabulary import MeshAxis


class _Stage(nn.Module):
    def __init__(self, module: nn.Module, number: int) -> None:
        super().__init__()
        self.module, self.number = module, number

    def forward(self, hidden: Tensor) -> Any:
        return self.module(self.number, hidden)


class TorchPipeline:
    """``torch.distributed.pipelining`` with a table of actions.

    Args:
        stages: of this rank, by number: modules without a common parameter, called with their number and their input.
        num_stages: of all ranks.
        actions: a line for each rank, as ``Schedule.to_csv`` writes it.
        num_micro_batches: of a step.
        loss_fn: of the last stage's output and a micro-batch's targets, a mean over its rows.
        mesh: with the axis ``pipe``.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], num_stages: int, actions: str, num_micro_batches: int, loss_fn:
        Callable[[Tensor, Tensor], Tensor], mesh: BaseMesh,
    ) -> None:  # fmt: skip
        group = torch_group(mesh, MeshAxis.PIPE, None)
        made = [
            PipelineStage(_Stage(module, number), number, num_stages, mesh.device, group=group)
            for number, module in stages.items()
        ]
        self._runtime = _PipelineScheduleRuntime(made, num_micro_batches, loss_fn=loss_fn)
        self._is_first, self._is_last = 0 in stages, num_stages - 1 in stages
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "actions.csv"
            path.write_text(actions)
            self._runtime._load_csv(str(path), format="compute_only")

    def run(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of all micro-batches.

        Args:
            inputs: this data rank's rows.
            targets: likewise.

        Returns:
            The losses of the micro-batches, on the rank of the last stage; none on the others.
        """
        losses: list[Tensor] = []
        given = (inputs,) if self._is_first else ()
        self._runtime.step(*given, target=targets if self._is_last else None, losses=losses if self._is_last else None)
        return losses
