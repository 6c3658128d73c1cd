"""What the planner must know of a workload: which parameters its loss reaches, the order of units, its optimizer.

All of it is found out by trying, on the meta device where that is possible: a small step of the optimizer, and the
graph of the first batch's loss.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardlab.comm.trees import map_tensors
from shardlab.experiment.batches import batches_of
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.workload import Workload, seeded
from shardlab.planner import PlannedModel, described
from shardlab.planner.setup import Optimizer
from shardlab.units import wrapped_modules


@dataclass(frozen=True)
class FirstForward:
    """What the loss of the first batch says of a model.

    Attributes:
        unused: names of trainable parameters that it does not depend on.
        units: names of the units in the order of their calls; a unit called twice is listed twice. None if unknown.
    """

    unused: tuple[str, ...] = ()
    units: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload as the planner sees it.

    Attributes:
        module: whose structure gives the units; it may be on the meta device.
        model: its parameters.
        optimizer: what it keeps; None if that cannot be planned.
        forward: what the first forward did.
    """

    module: nn.Module
    model: PlannedModel
    optimizer: Optimizer | None
    forward: FirstForward

    @classmethod
    def of(cls, config: CompareConfig) -> "PlannedWorkload":
        """That of a configuration."""
        module = config.on_meta
        tried = first_forward(config, module)
        return cls(module, described(module, unused=tried.unused), optimizer_of(config.trained), tried)


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


def first_forward(config: CompareConfig, module: nn.Module) -> FirstForward:
    """Try the loss of the first batch; nothing is known of a built-in model, or if the loss cannot be computed.

    Args:
        config: whose data and loss.
        module: the model; it may be on the meta device.
    """
    if config.workload is None:
        return FirstForward()
    rows, workload = config.global_batch // config.accumulation, config.trained
    batch = next(batches_of(workload, 0, 1, config.seed, rows)).batch
    try:
        return _tried(config, module.to("meta"), map_tensors(lambda tensor: tensor.to("meta"), batch))
    except Exception:  # what it computes depends on values: which expert a row takes, for example
        try:
            return _tried(config, workload.made(workload.build(config.seed), torch.device("cpu"), config.seed), batch)
        except Exception:
            return FirstForward()  # the ranks will raise the same, with the rank and the line


def _tried(config: CompareConfig, module: nn.Module, batch: Any) -> FirstForward:
    units: list[str] = []
    watched = wrapped_modules(module, config.wrap_policy).items()
    hooks = [unit.register_forward_pre_hook(partial(_note, units, name)) for name, unit in watched]
    try:
        with seeded(0):
            reached = _leaves_below(config.trained.loss(module, batch).grad_fn)
    finally:
        for hook in hooks:  # a unit may be a layer that is to be divided, which is refused with hooks
            hook.remove()
    params = module.named_parameters()
    unused = tuple(name for name, param in params if param.requires_grad and param not in reached)
    return FirstForward(unused, tuple(units))


def _note(units: list[str], name: str, *_: object) -> None:
    units.append(name)


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
