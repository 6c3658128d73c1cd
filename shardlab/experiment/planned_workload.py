"""What the planner must know of a workload: which parameters its loss reaches, the order of units, its optimizer.

All of it is found out by trying, on the meta device where that is possible: a small step of the optimizer, and the
graph of the first batch's loss.

Where layers are divided, ``PlannedTensorAxis`` says what a rank holds of the model and which messages its layers send.
The divided model is run without memory (``DryRunRank``), on the batches of the last step, which is the one that a
record is compared with. So the messages are those of any plan, in the order in which autograd sends them.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm.events import CollectiveEvent
from shardlab.comm.trees import map_tensors, tensors_in
from shardlab.engines.casts import cast_floating
from shardlab.engines.holdings import of_state
from shardlab.engines.module_hooks import may_nest, nodes_below
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.step_tensors import StepTensors
from shardlab.experiment.batches import batches_of, divide, rows_of
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.workload import Workload, seeded
from shardlab.planner import PlannedModel, described
from shardlab.planner.collectives import Call
from shardlab.planner.setup import SGD, Optimizer
from shardlab.tables import COLLECTIVES
from shardlab.tensor_parallel.plan_trial import MAX_NUMEL, DryRunRank
from shardlab.units import units_of, wrapped_modules
from shardlab.vocabulary import MeshAxis, Phase, Role

SMALL = (5, 7, 2, 2, 2, 2, 2, 2)  # none of one element: what an optimizer keeps in one would look like a parameter's


@dataclass(frozen=True)
class FirstForward:
    """What the loss of the first batch says of a model.

    Attributes:
        unused: names of trainable parameters that it does not depend on.
        units: names of the units in the order of their calls; a unit called twice, or again by a reentrant
            checkpoint in backward, is listed twice. None if unknown, or if other rows may call others.
        unreached: names of units that are frozen, and whose outputs need no gradient.
        calls: how often the loss calls the model or a method of it. None if unknown.
        by_rows: which parameters it depends on is decided by its rows; then ``unused`` is empty, for what one batch
            leaves out another may use.
    """

    unused: tuple[str, ...] = ()
    units: tuple[str, ...] | None = None
    unreached: tuple[str, ...] = ()
    calls: int | None = None
    by_rows: bool = False


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload as the planner sees it.

    Attributes:
        module: whose structure gives the units; it may be on the meta device.
        model: its parameters.
        optimizer: what it keeps, by parameter; None if that cannot be planned.
        forward: what the first forward did.
    """

    module: nn.Module
    model: PlannedModel
    optimizer: Mapping[str, Optimizer] | None
    forward: FirstForward

    @classmethod
    def of(cls, config: CompareConfig) -> "PlannedWorkload":
        """That of a configuration.

        Raises:
            ValueError: see ``optimizer_of`` and ``first_forward``.
        """
        module = config.on_meta
        tried = first_forward(config, module)
        return cls(module, described(module, unused=tried.unused), optimizer_of(config.trained, module), tried)


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
        optimizer = workload.optimizer(small)
        at_start = {name: kept for name, kept in _kept_by(optimizer, small).items() if kept != SGD}  # SGD keeps nothing
        after_one, after_two = _kept_after_step(optimizer, small), _kept_after_step(optimizer, small)
    except Exception as error:
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
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if of_state(key, value, "", (0, 0)).role is Role.OTHER:
            counters += value.nbytes
        elif value.shape == tensor.shape and value.dtype == tensor.dtype:
            values += 1
        elif value.numel() == 1:
            scalars += value.nbytes
        else:
            return None
    return Optimizer(values, counters, scalars)


def first_forward(config: CompareConfig, module: nn.Module) -> FirstForward:
    """Try the loss of the first batch; nothing is known of a built-in model, or if the loss cannot be computed.

    Args:
        config: whose data and loss.
        module: the model; it may be on the meta device.

    Raises:
        ValueError: the batch cannot be read here, see also ``batches_of``.
    """
    if config.workload is None:
        return FirstForward()
    rows, workload = config.global_batch // config.accumulation, config.trained
    # A function that divides the rows itself may know of no other number of ranks; a plan may be for more than rows.
    ranks = 1 if workload.divides_rows else config.data_ranks
    try:
        batch = next(batches_of(workload, 0, ranks, config.seed, rows)).batch
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"data: its first batch, from which a plan learns what the loss depends on, raised {type(error).__name__} "
            f"({error}); plan where it can be read"
        ) from error
    try:
        return _tried(config, module.to("meta"), map_tensors(lambda tensor: tensor.to("meta"), batch))
    except Exception:  # what it computes depends on values: which expert a row takes, for example
        return _tried_with_values(config, module, batch)


def _tried_with_values(config: CompareConfig, module: nn.Module, batch: Any) -> FirstForward:
    """Try a loss that depends on values: with the first batch, and with one row of it, which may use less."""
    if sum(param.numel() for param in module.parameters()) > MAX_NUMEL:
        return FirstForward(by_rows=True)  # there may be no memory for its values
    workload = config.trained
    try:
        values = workload.made(workload.build(config.seed), torch.device("cpu"), config.seed)
        found = _tried(config, values, batch)
    except Exception:
        return FirstForward()  # the ranks will raise the same, with the rank and the line
    try:
        alone = _tried(config, values, divide(batch, 0, rows_of(batch)).batch)
    except Exception:  # a function's batches may be of any kind, and a batch norm wants several rows
        alone = found
    if not found.unused and (alone.unused, alone.units) == ((), found.units):
        return found  # which rows there are makes no difference
    is_known = found.units == alone.units and set(found.units or ()) == set(wrapped_modules(values, config.wrap_policy))
    return FirstForward((), found.units if is_known else None, found.unreached, found.calls, by_rows=True)


def _tried(config: CompareConfig, module: nn.Module, batch: Any) -> FirstForward:
    called, need_gradients, calls = list[str](), set[str](), list[Any]()
    hooks: list[RemovableHandle] = []

    def after(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if any(tensor.grad_fn is not None for tensor in tensors_in(output)):
            need_gradients.add(name)

    for name, unit in wrapped_modules(module, config.wrap_policy).items():
        hooks.append(unit.register_forward_pre_hook(lambda *_, name=name: called.append(name)))
        hooks.append(unit.register_forward_hook(partial(after, name)))
    params = dict(module.named_parameters())
    try:
        with seeded(0):
            loss = config.trained.loss_on()(_Counted(module, calls), batch)
            nodes, num_calls = nodes_below(loss.grad_fn), len(calls)
            reached = {node.variable for node in nodes if hasattr(node, "variable")}
            if any(map(may_nest, nodes)):  # the graph does not show what a backward inside the backward reaches
                reached |= _with_gradients(loss, params)
    finally:
        for hook in hooks:  # a unit may be a layer that is to be divided, which is refused with hooks
            hook.remove()
    trainable = {name for name, param in params.items() if param.requires_grad}
    unused = tuple(name for name in params if name in trainable and params[name] not in reached)
    # Backward comes to a unit that trains even if the loss does not depend on it: another rank's may.
    frozen = [name for name, own in units_of(module, config.wrap_policy).items() if trainable.isdisjoint(own)]
    unreached = tuple(name for name in frozen if name not in need_gradients)
    return FirstForward(unused, tuple(called), unreached, num_calls)


def _with_gradients(loss: Tensor, params: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """Those to which a backward of the loss gives a gradient, which they do not keep."""
    try:
        loss.backward()  # reentrant checkpointing refuses torch.autograd.grad
        return {param for param in params.values() if param.grad is not None}
    finally:
        for param in params.values():
            param.grad = None


class _Counted:
    """The module as a loss takes it on ranks, where a call of it, or of its methods, goes through the engine."""

    def __init__(self, module: nn.Module, calls: list[Any]) -> None:
        self._module, self._calls = module, calls

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._counted(self._module, *args, **named)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return partial(self._counted, value) if inspect.ismethod(value) else value

    def _counted(self, function: Any, /, *args: Any, **named: Any) -> Any:
        self._calls.append(function)
        return function(*args, **named)


class PlannedTensorAxis:
    """A workload whose layers are divided.

    Args:
        config: its plan, data and options.
        module: the whole model; it may be on the meta device.

    Attributes:
        module: what one rank holds, without memory.
    """

    def __init__(self, config: CompareConfig, module: nn.Module) -> None:
        self._config, self._whole = config, module
        self._uncast = self._rank(Precision())
        self.module = self._uncast.module
        self._batches: list[list[Any]] | None = None
        self._known: dict[Any, list[CollectiveEvent] | None] = {}

    def collectives(self, strategy: str) -> pd.DataFrame | None:
        """Table ``collectives`` of the tensor axis, of all ranks; None if the forward depends on values.

        Raises:
            Exception: what the data raises.
        """
        precision = parse_precision(self._config.precision_of(strategy))
        self._batches = self._batches or [list(step) for step in _last_steps(self._config)]
        # Strategies differ only in where they cast, so they mostly share what was found.
        casts = (precision, strategy == "fsdp" and precision.compute is not None)
        rows: list[dict[str, Any]] = []
        for data_rank, batches in enumerate(self._batches):
            key = (casts, tuple(tuple((one.shape, one.dtype) for one in tensors_in(batch)) for batch in batches))
            if key not in self._known:
                self._known[key] = self._messages(strategy, precision, batches)
            if (found := self._known[key]) is None:
                return None
            for place in range(self._config.tp):
                rank = data_rank * self._config.tp + place
                rows += [_call(event).row("tensor", rank, seq, place) for seq, event in enumerate(found)]
        return COLLECTIVES.frame(rows)

    def _rank(self, precision: Precision) -> DryRunRank:
        plan = self._config.trained.tp_plan
        assert isinstance(plan, Mapping)
        return DryRunRank(self._whole, plan, self._config.tp, precision.compute, precision.buffers)

    def _messages(self, strategy: str, precision: Precision, batches: list[Any]) -> list[CollectiveEvent] | None:
        casts = precision != Precision()
        # With casts use a separate rank, whose units may get hooks that cast: strategies share the uncast one.
        rank = self._rank(precision) if casts else self._uncast
        units = wrapped_modules(rank.module, self._config.wrap_policy) if casts and strategy == "fsdp" else {}
        called = _Called(rank.module, precision, units.values())
        loss = self._config.trained.loss_over(rank.comm)
        try:
            return [event for batch in batches for event in rank.messages(partial(loss, called, batch))]
        except Exception:  # it depends on values, which are missing here; the ranks raise any other error too
            return None


class _Called:
    """The module as a loss takes it: inputs and outputs are cast where the engines cast them."""

    def __init__(self, module: nn.Module, precision: Precision, units: Iterable[nn.Module]) -> None:
        self._module, self._precision = module, precision
        for unit in units:
            unit.register_forward_pre_hook(
                lambda _, args, named: cast_floating((args, named), precision.compute), with_kwargs=True
            )

    def __call__(self, *args: Any, **named: Any) -> Any:
        args, named = cast_floating((args, named), self._precision.compute)
        return cast_floating(self._module(*args, **named), self._precision.output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _last_steps(config: CompareConfig) -> Iterator[Iterator[Any]]:
    """The micro-batches of each data rank in the last step."""
    workload, ranks = config.trained, config.data_ranks
    rows, last = config.global_batch // config.accumulation, config.steps * config.accumulation
    first = last - config.accumulation
    if workload.divides_rows:
        # Read once, since every rank gets its rows of the same batches.
        whole = [share.batch for share in islice(batches_of(workload, 0, 1, config.seed, rows), first, last)]
        yield from ((divide(batch, rank, ranks).batch for batch in whole) for rank in range(ranks))
        return
    for rank in range(ranks):
        yield (share.batch for share in islice(batches_of(workload, rank, ranks, config.seed, rows), first, last))


def _call(event: CollectiveEvent) -> Call:
    """The call of which the rank without memory has announced an event; in which phase it is sent is not planned."""
    itemsize = event.num_bytes // max(1, event.numel)
    return Call(
        event.op, MeshAxis.TENSOR, event.tag, Phase.FORWARD, event.dtype, itemsize, event.numel, event.group_size
    )
