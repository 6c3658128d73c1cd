"""What the planner must know of a workload: its parameters, which of them the loss reaches, what its optimizer keeps.

All of it is found out by trying, on the meta device where that is possible: a small step of the optimizer, and the
graph of the first batch's loss.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardlab.comm.trees import map_tensors
from shardlab.experiment.batches import batches_of
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.workload import Workload, seeded
from shardlab.planner import PlannedModel, described
from shardlab.planner.setup import Optimizer


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload as the planner sees it.

    Attributes:
        module: whose structure gives the units; it may be on the meta device.
        model: its parameters.
        optimizer: what it keeps; None if that cannot be planned.
        unused: names of the parameters that no rank's loss reaches.
    """

    module: nn.Module
    model: PlannedModel
    optimizer: Optimizer | None
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: CompareConfig) -> "PlannedWorkload":
        """That of a configuration."""
        module = config.trained.on_meta()
        unused = tuple(unused_by(config, module))
        return cls(module, described(module, unused=unused), optimizer_of(config.trained), unused)


def optimizer_of(workload: Workload) -> Optimizer | None:
    """What the workload's optimizer keeps for each element, seen on a small matrix; None if that cannot be planned."""
    param = nn.Parameter(torch.zeros(5, 7))
    optimizer = workload.optimizer([param])
    param.grad = torch.zeros_like(param)
    optimizer.step()
    tensors = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    values = [tensor for tensor in tensors if tensor.shape == param.shape and tensor.dtype == param.dtype]
    counters = [tensor for tensor in tensors if tensor.numel() == 1]
    if len(values) + len(counters) < len(tensors):
        return None
    return Optimizer(len(values), sum(tensor.nbytes for tensor in counters))


def unused_by(config: CompareConfig, module: nn.Module) -> list[str]:
    """Parameters that the loss of the first batch does not depend on; none where that cannot be told.

    Args:
        config: whose data and loss.
        module: the model; it may be on the meta device.
    """
    if config.workload is None:
        return []
    rows, workload = config.global_batch // config.accumulation, config.trained
    batch = next(batches_of(workload, 0, 1, config.seed, rows)).batch
    try:
        reached = _reached(workload, module.to("meta"), map_tensors(lambda tensor: tensor.to("meta"), batch))
    except Exception:  # what it computes depends on values: which expert a row takes, for example
        try:
            module = workload.made(workload.build(config.seed), torch.device("cpu"), config.seed)
            reached = _reached(workload, module, batch)
        except Exception:
            return []  # the ranks will raise the same, with the rank and the line
    return [name for name, param in module.named_parameters() if param.requires_grad and param not in reached]


def _reached(workload: Workload, module: nn.Module, batch: Any) -> set[torch.Tensor]:
    with seeded(0):
        return _leaves_below(workload.loss(module, batch).grad_fn)


def _leaves_below(node: Any) -> set[torch.Tensor]:
    """The tensors that a backward from ``node`` gives gradients."""
    seen, ahead, leaves = set(), [node], set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves |= {node.variable} if hasattr(node, "variable") else set()
            ahead += [following for following, _ in node.next_functions]
    return leaves
