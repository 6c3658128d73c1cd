"""A step without ranks, values or time: the engine itself runs, on memory that nobody touches and a clock that is told.

    records = dry_run(config, "fsdp", clock, seconds)       # the five tables, source="predicted"
    dry_step(config, "fsdp", known, shapes).messages()      # what all ranks send; and what each holds

``dry_run`` records one rank. Operations compute nothing (``dry.without_values``); each moves the clock by what it would
cost, and messages take their turn on the queue of their axis. So order, bytes, waits and the peak of memory are those
of the engine and the recorder, with nothing written twice, and the times are a forecast. Ranks that are alike are one:
the others are taken to come to every message at the same moment.

``dry_step`` is of all ranks, without times. FSDP learns from the first step in which order units are called, and a
strategy of the reader's own may begin otherwise than it goes on: of these the second step counts. Of a strategy of the
reader's own, what is at rest is read too, with the optimizer of the workload. Batches are the first one again and
again, for messages do not depend on what is in it; unless layers are divided or the loss sends too: then they are those
of the last step, with which a record is compared.
"""

import contextlib
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from shardlab.comm import BaseMesh
from shardlab.comm.foretold import ForetoldMesh, ToldClock
from shardlab.comm.trees import tensors_in
from shardlab.dry.messages import DryRun, Log, Places
from shardlab.dry.without_values import WithoutValues
from shardlab.engines import Division, Engine
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.known_workload import PlannedWorkload, first_forward
from shardlab.experiment.run.rank_run import engine_of, recorded_run, step_of
from shardlab.experiment.trained.batches import DataEndedError, Share, batches_of, divide
from shardlab.experiment.trained.tensor import loss_of
from shardlab.launch import place
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.planner.memory import memory_table
from shardlab.records.store import Records, RunWriter, load_run, write_manifest
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.trace.unlike_steps import Shapes, shapes_of, within
from shardlab.units import wrapped_modules
from shardlab.vocabulary import MeshAxis, Role

STEPS = 2  # the first makes the optimizer's state
OperationSeconds = Callable[[Any, tuple[Any, ...], Any], float]
"""Seconds of an operation alone on its device, by its overload, its arguments and its result."""


def dry_run(
    config: CompareConfig, strategy: str, clock: ToldClock, operation_seconds: OperationSeconds, rank: int = 0,
    host_seconds: float = 0.0, *, traces_memory: bool = True,
) -> Records:  # fmt: skip
    """The records of the first two steps of one rank of a strategy, with source 'predicted'.

    A stage waits for other ranks, so times of one are none: see ``refuse_stages``.

    Args:
        config: what is trained, and how; its ranks need not be there.
        strategy: one of ours.
        clock: which the run moves; it knows what messages cost.
        operation_seconds: what operations cost.
        rank: which rank.
        host_seconds: of a step: what the engine's own code takes beside operations.
        traces_memory: find the peaks, which takes about as long as all else; those of later steps too that have larger
            or smaller batches, whose times do not count.

    Raises:
        RuntimeError: the step depends on values.
    """

    def ran(func: Any, args: tuple[Any, ...], result: Any) -> None:
        clock.compute(operation_seconds(func, args, result))

    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Where one process uses all parameters, so do ranks together, though each may use its own experts alone.
        are_alike = bool(first_forward(config, config.on_meta, config.first_batch()).unused)
        mesh = stack.enter_context(ForetoldMesh(config.mesh_axes(strategy), rank, clock, are_alike=are_alike))
        mode = stack.enter_context(WithoutValues(ran))
        writer = RunWriter(directory, rank, strategy, "predicted")
        with recorded_run(_apart(config), strategy, mesh, writer, 0, clock) as run:
            run.shares = mode.with_values(run.shares)
            later = other_steps(mode.with_values(run.batches_anew()), config) if traces_memory else []
            numbers = [*range(STEPS), *later]
            for step, before in zip(numbers, [-1, *numbers], strict=False):
                run.pass_over(step - before - 1)
                clock.owe(host_seconds)
                run.step(step, trace_memory=traces_memory)  # which takes no time on this clock
        write_manifest(directory, {"run": strategy, "source": "predicted"})
        records = load_run(directory)
        return replace(records, steps=records.steps.assign(traced_memory=records.steps["step"] >= STEPS))


def refuse_stages(config: CompareConfig, strategy: str) -> None:
    """Refuse to time stages, which wait for other ranks, by the run of one rank."""
    if config.staged_of(strategy) is not None:
        raise ValueError(
            f"strategy: {strategy!r} has stages, which wait for other ranks; what_if and play know their list"
        )


def other_steps(shares: Iterator[Share], config: CompareConfig) -> list[int]:
    """The steps after the first two whose batches have the largest shapes, or the smallest, but for the first step.

    Args:
        shares: of all steps.
        config: says how many of them a step takes, and the number of steps; data may end before.
    """
    seen: dict[Shapes, int] = {}
    with contextlib.suppress(DataEndedError):
        for step in range(config.steps):
            shapes = shapes_of(tensors_in([share.batch for share in islice(shares, config.accumulation)]))
            seen.setdefault(shapes, step) if step else None
    is_largest = (not any(within(shapes, other) for other in seen if other != shapes) for shapes in seen)
    is_smallest = (all(within(shapes, other) for other in seen) for shapes in seen)
    extremes = zip(seen.values(), is_largest, is_smallest, strict=True)
    return [step for step, *is_extreme in extremes if any(is_extreme) and step >= STEPS]


KnownShapes = dict[Hashable, Any]


@dataclass(frozen=True)
class Held:
    """What a rank holds.

    Attributes:
        at_rest: bytes by role; of our strategies without the optimizer's.
        gathered_bytes: the most of gathered parameters at one moment.
        divisions: how the parameters are divided.
    """

    at_rest: dict[Role, int]
    gathered_bytes: int
    divisions: Sequence[Division]


def dry_step(config: CompareConfig, strategy: str, known: PlannedWorkload, shapes: KnownShapes) -> DryRun[Held]:
    """A step of a strategy on all ranks.

    Args:
        config: what is trained, and how.
        strategy: its name; one of ours, or of the reader's own.
        known: of the workload.
        shapes: see ``WithoutValues``.

    Raises:
        Exception: what the step raises, for example because it depends on values.
    """
    batches = [[known.batch] * config.accumulation] * config.data_ranks
    by_rows = config.divides(strategy) or config.trained.takes_mesh
    if by_rows:
        batches = [list(step) for step in _last_steps(config)]
    shapes_of = [tuple((one.shape, one.dtype) for one in tensors_in(step)) for step in batches]
    own, made = config.inside(strategy) in config.own_strategies, config.strategy(strategy)
    by_unit = made is not None and made.by_unit
    num_steps = 2 if own or by_unit else 1

    def kind(rank: int, held: Held, places: Places) -> Hashable:
        pieces = [_pieces(one, places[one.comm.axis][rank]) for one in held.divisions if own and one.is_spread]
        stage = places[MeshAxis.PIPE][rank] if MeshAxis.PIPE in places else 0
        return stage, shapes_of[rank // config.tp] if by_rows else None, *pieces

    def step(mesh: BaseMesh, log: Log) -> Held:
        own_config = _apart(config)
        its_engine, pipeline = engine_of(own_config, strategy, mesh, None if own else _keeps_nothing)
        with its_engine as engine:
            assert isinstance(engine, Engine)
            watch = _Watch(engine, log, on_gpu=place(config.ranks, config.device).device_type == "cuda")
            train_step = step_of(
                config, engine, pipeline, loss_of(own_config.trained, mesh, is_divided=config.divides(strategy)),
                recorder=watch, scaler=GradScaler() if config.scales_loss(strategy) else None,
            )  # fmt: skip
            called = list[str]()
            for name, unit in wrapped_modules(engine.module, config.wrap_policy).items():
                unit.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            for _ in range(num_steps):
                with log.step():
                    for micro_batch in batches[engine.data_rank]:
                        train_step(micro_batch)
            route = known.forward.called if pipeline is None else None
            if by_unit and route is not None and called != [*route] * config.accumulation * num_steps:
                raise RuntimeError("which units it calls depends on values")
            return Held(watch.held, watch.gathered_bytes, engine.divisions())

    return DryRun(step, config.mesh_axes(strategy), kind, shapes, alike=bool(known.forward.unused))  # as in dry_run


def _apart(config: CompareConfig) -> CompareConfig:
    """The same with a model and a loss of its own: an engine takes the parameters of the module that it is given."""
    own = copy(config)
    vars(own)["trained"] = config.trained.apart("model", "loss", "tp_loss")
    return own


def _keeps_nothing(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.0)


def memory_of(run: DryRun[Held], name: str) -> pd.DataFrame:
    """Table ``memory`` of all ranks at rest."""
    return memory_table(name, {rank: run.of_rank(rank)[1].at_rest for rank in range(run.num_ranks)})


class _Watch:
    """Reads what an engine holds, as a recorder does."""

    def __init__(self, engine: Engine, log: Log, *, on_gpu: bool) -> None:
        self._engine, self.phase, self._on_gpu = engine, log.phase, on_gpu
        self.held: dict[Role, int] = {}
        self.gathered_bytes = 0
        for unit in engine.strategy.units:
            for shards in unit.shards:
                shards.watchers.append(self._look)

    def at_rest(self) -> None:
        """After a step, while gradients are there."""
        live = self._engine.live_tensors()
        if self._on_gpu:  # there torch keeps counters in host memory
            live = {**live, Role.OTHER: list(self._engine.module.buffers())}
        self.held = bytes_by_role(live)

    def _look(self, shown: bool) -> None:
        if shown:  # before something is freed there is most
            return
        shards = (one for unit in self._engine.strategy.units for one in unit.shards)
        gathered = [tensor for one in shards for tensor in one.gathered_tensors()]
        num_bytes = bytes_by_role({Role.GATHERED_PARAMETER: gathered})[Role.GATHERED_PARAMETER]
        self.gathered_bytes = max(self.gathered_bytes, num_bytes)


def _pieces(division: Division, place: int) -> Hashable:
    return tuple((name, stop - start) for name, (start, stop) in division.pieces_of(place).items())


def _last_steps(config: CompareConfig) -> Iterator[Iterator[Any]]:
    """The micro-batches of each data rank in the last step."""
    workload, ranks = config.trained, config.data_ranks
    rows, last = config.micro_batch_rows, config.steps * config.accumulation
    first = last - config.accumulation
    if workload.divides_rows:
        # Read once, since every rank gets its rows of the same batches.
        whole = [share.batch for share in islice(batches_of(workload, 0, 1, config.seed, rows), first, last)]
        yield from ((divide(batch, rank, ranks).batch for batch in whole) for rank in range(ranks))
        return
    for rank in range(ranks):
        yield (share.batch for share in islice(batches_of(workload, rank, ranks, config.seed, rows), first, last))
