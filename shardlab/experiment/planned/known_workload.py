"""What the planner must know of a workload: which parameters its loss reaches, and what its optimizer keeps.

All of it is found out by trying, on the meta device where that is possible: a small step of the optimizer, and the
graph of the first batch's loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm.trees import map_tensors, tensors_in
from shardlab.engines.any_engine import of_state
from shardlab.engines.autograd_nodes import may_nest, nodes_below
from shardlab.engines.step_tensors import StepTensors
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.trained.batches import divide, rows_of
from shardlab.experiment.trained.workload import Workload, seeded
from shardlab.planner.setup import SGD, Optimizer
from shardlab.tensor_parallel.plan_trial import MAX_NUMEL, first_rank_of
from shardlab.units import wrapped_modules
from shardlab.vocabulary import Role

SMALL = (5, 7, 2, 2, 2, 2, 2, 2)  # none of one element: what an optimizer keeps in one would look like a parameter's


@dataclass(frozen=True)
class FirstForward:
    """What the loss of the first batch says of a model.

    Attributes:
        unused: names of trainable parameters that it does not depend on.
        by_rows: which parameters it depends on is decided by its rows; then ``unused`` is empty, for what one batch
            leaves out another may use.
        called: where it needs values, names of units in the order of their calls; None where all of that is known
            without values, or cannot be known: ``by_rows`` it may then differ too.
    """

    unused: tuple[str, ...] = ()
    by_rows: bool = False
    called: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload as the planner sees it.

    Attributes:
        module: whose structure gives the units; it may be on the meta device.
        optimizer: what it keeps, by parameter; None if that cannot be planned.
        forward: what the first forward did.
        batch: the first one, of a rank.
    """

    module: nn.Module
    optimizer: Mapping[str, Optimizer] | None
    forward: FirstForward
    batch: Any

    @classmethod
    def of(cls, config: CompareConfig) -> "PlannedWorkload":
        """That of a configuration.

        Raises:
            ValueError: see ``optimizer_of`` and ``batches.first_batch``.
        """
        module, batch = config.on_meta, config.first_batch()
        tried = first_forward(config, module, batch)
        if config.trained.divides_rows:
            batch = divide(batch, 0, min(config.data_ranks, rows_of(batch))).batch
        return cls(module, optimizer_of(config.trained, module), tried, batch)


def optimizer_of(workload: Workload, module: nn.Module) -> dict[str, Optimizer] | None:
    """What the workload's optimizer keeps for each parameter, seen on small tensors; None if that cannot be planned.

    Args:
        workload: whose optimizer.
        module: whose parameters; it may be on the meta device.

    Raises:
        ValueError: the optimizer raises an error with the small tensors. If sizes decide which groups it makes, what is
            planned is that of the small ones.
    """
    params = dict(module.named_parameters())
    small = StepTensors({name: _small(param) for name, param in params.items()})
    try:
        optimizer = workload.optimizer_of(small)
        at_start = {name: kept for name, kept in _kept_by(optimizer, small).items() if kept != SGD}  # SGD keeps nothing
        after_one, after_two = _kept_after_step(optimizer, small), _kept_after_step(optimizer, small)
    except Exception as error:
        if str(error).startswith("optimizer: "):  # which says it
            raise
        raise ValueError(
            f"optimizer: it raised {type(error).__name__} ({error}) with small tensors of the parameters' names, so "
            "what it keeps cannot be planned; choose parameters by name, and let no size, value or identity decide"
        ) from error
    known = {name: replace(kept, from_start=at_start.get(name)) for name, kept in after_one.items() if kept is not None}
    # State that begins later would make the bytes at rest those of a step, and not of the run.
    return known if len(known) == len(params) and after_one == after_two else None


def _small(param: nn.Parameter) -> nn.Parameter:
    """A tensor of as many dims and of the same dtype, with what a user has noted at the parameter."""
    small = nn.Parameter(torch.zeros(SMALL[: param.dim()], dtype=param.dtype), requires_grad=param.requires_grad)
    vars(small).update(vars(param))
    return small


def _kept_after_step(optimizer: torch.optim.Optimizer, tensors: StepTensors) -> dict[str, Optimizer | None]:
    for _, tensor in tensors.items():
        tensor.grad = torch.zeros_like(tensor) if tensor.requires_grad else None
    optimizer.step()
    return _kept_by(optimizer, tensors)


def _kept_by(optimizer: torch.optim.Optimizer, tensors: StepTensors) -> dict[str, Optimizer | None]:
    return {name: _kept(tensor, optimizer.state.get(tensor, {})) for name, tensor in tensors.items()}


def _kept(tensor: Tensor, state: Mapping[str, Any]) -> Optimizer | None:
    """What is kept for one tensor, counted as the engines count it; None if its size follows no rule."""
    values = counters = scalars = 0
    for key, value in ((key, value) for key, kept in state.items() for value in tensors_in(kept)):
        if of_state(key, value, "", (0, 0)).role is Role.OTHER:
            counters += value.nbytes
        elif value.shape == tensor.shape and value.dtype == tensor.dtype:
            values += 1
        elif value.numel() == 1:
            scalars += value.nbytes
        else:
            return None
    return Optimizer(values, counters, scalars)


def first_forward(config: CompareConfig, module: nn.Module, batch: Any) -> FirstForward:
    """Try the loss of the first batch; of a built-in model all is known, and nothing if it cannot be computed."""
    if config.workload is None:
        return FirstForward()
    try:
        unused, _ = _tried(config, module.to("meta"), map_tensors(lambda tensor: tensor.to("meta"), batch))
    except Exception:  # what it computes depends on values: which expert a row takes, for example
        return _tried_with_values(config, module, batch)
    return FirstForward(unused)


def _tried_with_values(config: CompareConfig, module: nn.Module, batch: Any) -> FirstForward:
    """Try a loss that depends on values: with the first batch, and with one row of it, which may use less."""
    if sum(param.numel() for param in module.parameters()) > MAX_NUMEL:
        return FirstForward(by_rows=True)  # there may be no memory for its values
    workload = config.trained.apart("model")
    try:
        values = workload.made(workload.build(config.seed), torch.device("cpu"), config.seed)
        unused, called = _tried(config, values, batch)
    except Exception:
        return FirstForward()  # the ranks will raise the same, with the rank and the line
    try:
        unused_alone, called_alone = _tried(config, values, divide(batch, 0, rows_of(batch)).batch)
    except Exception:  # a function's batches may be of any kind, and a batch norm wants several rows
        unused_alone, called_alone = unused, called
    if (unused, unused_alone) == ((), ()) and called == called_alone:
        return FirstForward(called=called)  # which rows there are makes no difference
    is_known = called == called_alone and set(called) == set(wrapped_modules(values, config.wrap_policy))
    return FirstForward(by_rows=True, called=called if is_known else None)


def _tried(config: CompareConfig, module: nn.Module, batch: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of trainable parameters that the loss does not depend on; and of units in the order of their calls."""
    called = list[str]()
    units = wrapped_modules(module, config.wrap_policy)
    hooks = [unit.register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name, unit in units.items()]
    params = dict(module.named_parameters())
    try:
        with seeded(0):
            loss = config.trained.apart("loss").loss_on()(module, batch)
            nodes = nodes_below(loss.grad_fn)
            reached = {node.variable for node in nodes if hasattr(node, "variable")}
            if any(map(may_nest, nodes)):  # the graph does not show what a backward inside the backward reaches
                reached |= _with_gradients(loss, params)
    finally:
        for hook in hooks:  # a unit may be a layer that is to be divided, which is refused with hooks
            hook.remove()
    return tuple(name for name, param in params.items() if param.requires_grad and param not in reached), tuple(called)


def _with_gradients(loss: Tensor, params: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """Those to which a backward of the loss gives a gradient, which they do not keep."""
    try:
        loss.backward()  # reentrant checkpointing refuses torch.autograd.grad
        return {param for param in params.values() if param.grad is not None}
    finally:
        for param in params.values():
            param.grad = None


def divided_module(config: CompareConfig, module: nn.Module) -> nn.Module:
    """What one rank holds of a model whose layers are divided, without memory."""
    plan = config.trained.tp_plan
    assert isinstance(plan, Mapping)
    return first_rank_of(module, plan, config.tp)
