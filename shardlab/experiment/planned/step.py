"""What a workload's step sends and holds under a strategy: the engine's own step, without ranks and values.

FSDP learns from the first step in which order units are called, and a strategy of the reader's own may begin otherwise
than it goes on: of these the second step counts. Of a strategy of the reader's own, what is at rest is read too, with
the optimizer of the workload.

Batches are the first one again and again, for messages do not depend on what is in it; unless layers are divided or the
loss sends too: then they are those of the last step, with which a record is compared.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pandas as pd
import torch

from shardlab.comm import BaseMesh
from shardlab.comm.trees import tensors_in
from shardlab.dry.messages import DryRun, Log, Places
from shardlab.engines import Division, Engine
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.known_workload import PlannedWorkload
from shardlab.experiment.run.rank_run import engine_of, step_of
from shardlab.experiment.trained.batches import batches_of, divide
from shardlab.experiment.trained.tensor import loss_of
from shardlab.launch import place
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.planner.memory import memory_table
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.units import wrapped_modules
from shardlab.vocabulary import MeshAxis, Role

Shapes = dict[Hashable, Any]


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


def dry_step(config: CompareConfig, strategy: str, known: PlannedWorkload, shapes: Shapes) -> DryRun[Held]:
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
        its_engine, pipeline = engine_of(config, strategy, mesh, None if own else _keeps_nothing)
        with its_engine as engine:
            assert isinstance(engine, Engine)
            watch = _Watch(engine, log, on_gpu=place(config.ranks, config.device).device_type == "cuda")
            train_step = step_of(
                config, engine, pipeline, loss_of(config.trained, mesh, is_divided=config.divides(strategy)),
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

    return DryRun(step, config.mesh_axes(strategy), kind, shapes, alike=not known.forward.by_rows)


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
        for unit in engine.units:
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
        shards = (one for unit in self._engine.units for one in unit.shards)
        gathered = [tensor for one in shards for tensor in one.gathered_tensors()]
        num_bytes = bytes_by_role({Role.GATHERED_PARAMETER: gathered})[Role.GATHERED_PARAMETER]
        self.gathered_bytes = max(self.gathered_bytes, num_bytes)


def _pieces(division: Division, place: int) -> Hashable:
    return tuple((name, stop - start) for name, (start, stop) in division.pieces_of(place).items())


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
