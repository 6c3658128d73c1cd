"""One strategy on the ranks: what each rank trains, and what it records.

Whatever a rank calls stands here: what ``comparison`` imports besides, pictures above all, no rank needs.
"""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.comm import BaseMesh, CollectiveEvent, Observer
from shardlab.comm.callers import PAST, num_sent_by_torch
from shardlab.comm.mesh import Mesh
from shardlab.comm.rank_life import observing_new
from shardlab.comm.signed_messages import all_gather_bytes
from shardlab.comm.trees import map_tensors, tensors_in
from shardlab.engines import AnyEngine, Engine, OptimizerFn, Strategy, build_engine, engine_options
from shardlab.experiment.config import CompareConfig, takes_buckets
from shardlab.experiment.directory import checkpoint_directory, same_options
from shardlab.experiment.run.pipeline_step import PipelineStep
from shardlab.experiment.run.rank_checks import FiniteCheck, FirstLoss, WatchedLoss, counts_of, sums_of
from shardlab.experiment.run.shard_rows import shard_rows
from shardlab.experiment.run.train_step import StepResult, TrainStep
from shardlab.experiment.trained.batches import NUM_BATCHES, Share, batches_of, first_other, size_of
from shardlab.experiment.trained.tensor import divided, loss_of
from shardlab.experiment.trained.workload import LossFn, seeded
from shardlab.installed import num_cores
from shardlab.launch import current
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.partition.ring_cost import Link
from shardlab.pipeline import Pipeline
from shardlab.records.store import RunWriter
from shardlab.tensor_parallel.rng import generator_states
from shardlab.testing.agreement_check import Did, did
from shardlab.trace.clock import Origins, Reading, clock_for, own_origin_ns
from shardlab.trace.memory_by_role import LiveTensors
from shardlab.trace.observed import Row
from shardlab.trace.recorder import Recorder, sampled_at_rest
from shardlab.trace.units import watch_units, watched_modules
from shardlab.vocabulary import Phase, SpanKind, dtype_name


@dataclass(frozen=True)
class Progress:
    """Sent to the parent process after every step."""

    strategy: str
    step: int
    loss: float


@dataclass
class RankReport:
    """What a rank has seen of its run so far, and returns at its end.

    Attributes:
        recorder_share: time of recording over time of the steps, see ``Recorder.cost_share``.
        padding_bytes: bytes of padding in one copy of the parameters.
        not_finite: the first step in which a number of this rank's own rows was inf or NaN, by what it was.
        did: what the rank had called, and its parameters' checksum, after some of the steps.
        drew: whether a step drew random numbers, as dropout does. Data do not count: they draw apart from training, see
            ``batches``.
        autocast: in which dtype the model was asked to compute by an autocast that is none of the strategy's; or empty.
        batches: checksums of the first ones, see ``batches``; of those that were passed over too.
        other_batch: the first of them that is not what the checkpoint it went on from was trained on; None if all are.
        buffers: checksums after the first steps, and after some of the later ones, see ``rank_checks``.
        first: of its first micro-batch.
        has_loss: whether it computes the loss, as the ranks of a pipeline's last stage do.
    """

    recorder_share: float = 0.0
    padding_bytes: int = 0
    not_finite: dict[str, int] = field(default_factory=dict)
    did: dict[int, Did] = field(default_factory=dict)
    drew: bool = False
    autocast: str = ""
    batches: list[int] = field(default_factory=list)
    other_batch: int | None = None
    buffers: dict[int, dict[str, int]] = field(default_factory=dict)
    first: FirstLoss | None = None
    has_loss: bool = True


class RankRun:
    """One strategy on one rank, recorded: its data, its training step and its recorder.

    Args:
        config: model, data and options.
        engine: the strategy.
        recorder: of this rank.
        pipeline: the rank's stages, if there are any.
    """

    def __init__(
        self, config: CompareConfig, engine: AnyEngine, recorder: Recorder, pipeline: Pipeline | None = None
    ) -> None:
        self.engine, self.recorder = engine, recorder
        self.report = RankReport(has_loss=pipeline is None or pipeline.has_loss)
        self.shards: list[Row] = []
        """Who held what when memory was last read: after a step, while gradients were still there."""
        self._first_counts, self._first_weight = dict[str, float](), 1.0
        self._config, workload = config, config.trained
        self.shares = self.batches_anew()
        """What is trained on next."""
        scheduler = None if workload.scheduler is None else workload.scheduler(engine.optimizer)
        if scheduler is not None and not hasattr(scheduler, "step"):
            raise ValueError(f"scheduler: it returned {type(scheduler).__name__}; return a learning rate scheduler")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("scheduler: ReduceLROnPlateau asks for a metric at each step; give one that counts steps")
        scaler = GradScaler() if config.scales_loss(engine.name) else None
        self.finite = FiniteCheck(None if scaler is not None else engine.params.values())
        self.loss = WatchedLoss(loss_of(workload, engine.mesh, is_divided=config.divides(engine.name)), self.finite)
        self._train_step = step_of(
            config, engine, pipeline, self.loss, scheduler=scheduler, scaler=scaler, recorder=recorder
        )

    @property
    def first(self) -> FirstLoss | None:
        """Of the first micro-batch; None before."""
        loss = self.loss.first
        return None if loss is None else FirstLoss(float(loss), self._first_weight, self._first_counts)

    def look_at_autocast(self, *_: Any) -> None:
        """To be called where the model computes."""
        if torch.is_autocast_enabled(device := self.engine.mesh.device.type):
            self.report.autocast = dtype_name(torch.get_autocast_dtype(device))

    def batches_anew(self) -> Iterator[Share]:
        """The rank's batches from the first on."""
        config, engine = self._config, self.engine
        return batches_of(config.trained, engine.data_rank, engine.num_data_ranks, config.seed, config.micro_batch_rows)

    def live_tensors(self) -> LiveTensors:
        """The engine's tensors by role, for the recorder, which asks when it reads memory."""
        self.shards = shard_rows(self.engine)
        return self.engine.live_tensors()

    def save(self, directory: Path) -> None:
        """Write a checkpoint; collective."""
        extra = same_options(self._config, self._config.resumed_rows)
        self.engine.save(directory, extra={**extra, self._whose_batches: self.report.batches}, **self._objects)

    def resume(self, directory: Path) -> int:
        """Resume from a checkpoint and skip the batches that it was trained on; collective.

        Returns:
            Number of the next step.
        """
        # Before the batches are passed over: only the checkpoint says how many there were.
        extra = self.engine.load(directory, **self._objects)
        self.pass_over(self.engine.num_steps)
        # Of rank 0, which has written them; another rank may have had other rows.
        if self.engine.data_rank == 0:
            self.report.other_batch = first_other(extra.get(self._whose_batches, []), self.report.batches)
        return self.engine.num_steps

    def pass_over(self, steps: int) -> None:
        """Read the batches of so many steps, and do not train on them."""
        for _ in range(steps * self._config.accumulation):
            self._next_share()

    @property
    def _whose_batches(self) -> str:
        """What a checkpoint calls the checksums: those of a rank's own rows are none for another number of ranks."""
        return "batches" if self._config.trained.divides_rows else f"batches of rank 0 of {self.engine.num_data_ranks}"

    def _next_share(self) -> Share:
        share = next(self.shares)
        self.report.batches += [] if share.checksum is None else [share.checksum]
        return share

    @property
    def _objects(self) -> dict[str, Any]:
        """What changes in training besides the engine."""
        found = {"scheduler": self._train_step.scheduler, "scaler": self._train_step.scaler}
        return {name: value for name, value in found.items() if value is not None}

    def step(self, step: int, *, trace_memory: bool | None = False, reports_norm: bool = False) -> StepResult:
        """Train and record step number ``step``.

        Args:
            step: its number.
            trace_memory: whether its peak by role is found, which slows it; None for if its batches are unlike those of
                all traced steps, so that its peak may be another.
            reports_norm: whether the norm of the gradients is recorded although they are not clipped.
        """
        self._train_step.reports_norm = reports_norm
        before = _random_states(self.engine.mesh.device)
        with self.recorder.step(step, trace_memory=bool(trace_memory)):
            result, num_tokens = self._train(may_trace=trace_memory is not False)
        self.report.drew |= _random_states(self.engine.mesh.device) != before
        self.finite.ended(step, result.own_loss)
        self.recorder.finish_step(result.loss, result.grad_norm, result.learning_rate, num_tokens)
        return result

    def _train(self, *, may_trace: bool) -> tuple[StepResult, int]:
        result, num_tokens = None, 0
        for share in self._shares(may_trace=may_trace):
            num_tokens += size_of(share.batch)
            if may_trace:
                self.recorder.called("batch", tensors_in(share.batch), self._train_step.losses, can_trace=True)
            result = self._train_step(share.batch, share.weight)
        assert result is not None
        return result, num_tokens

    def _shares(self, *, may_trace: bool) -> Iterator[Share]:
        """The micro-batches of a step on this rank's device. Where they are weighed, all are read before the first."""
        read = (self._read(may_trace=may_trace) for _ in range(self._config.accumulation))
        yield from read if self._config.trained.weight is None else self._weighed(list(read))

    def _read(self, *, may_trace: bool) -> Share:
        with self.recorder.phase(Phase.DATA, SpanKind.DATA):
            if may_trace:
                self.recorder.look_at_data()
            share = self._next_share()
            if not self._first_counts and self._config.workload is not None:
                self._first_counts, self._first_weight = counts_of(share.batch), share.weight
            batch = map_tensors(lambda tensor: _on_device(tensor, self.engine.mesh.device), share.batch)
            return replace(share, batch=batch)

    def _weighed(self, shares: list[Share]) -> list[Share]:
        """Their weights, of which the mean over the ranks and micro-batches of the step is 1; collective."""
        own = torch.tensor([sum(share.counted for share in shares)], dtype=torch.float64)
        with self.recorder.phase(Phase.METRICS):
            mean = float(self.engine.mean_over_ranks(own.to(self.engine.mesh.device), tag="weights")) / len(shares)
        if not mean > 0:
            raise ValueError("weight: it is 0 for every batch of a step, so there is nothing to train on")
        return [replace(share, weight=share.counted / mean) for share in shares]


@contextlib.contextmanager
def recorded_run(
    config: CompareConfig, strategy: str, mesh: BaseMesh, writer: RunWriter, origin_ns: int, clock: Any = None
) -> Iterator[RankRun]:
    """A model under ``strategy`` on this rank, ready to train; everything it does is recorded to ``writer``.

    The recorder observes the mesh before the engine is made, so that its first broadcast is recorded too, as step -1.

    Args:
        config: model, data and options.
        strategy: a name from ``engines.STRATEGIES``.
        mesh: where it trains.
        writer: writer of this rank; it is closed at the end.
        origin_ns: ``time.perf_counter_ns`` at the start of the run, the same on all ranks of a host.
        clock: of the compute; None for that of the mesh's device.
    """
    with contextlib.ExitStack() as stack:
        # Left in reverse order: the recorder still sees the engine close, and the writer closes last.
        stack.enter_context(contextlib.closing(writer))
        recorder = Recorder(writer, clock or clock_for(mesh.device), origin_ns, device=mesh.device)
        # Run and recorder hold each other, and a loader that is freed with a cycle waits 5 s for each of its workers.
        stack.callback(setattr, recorder, "live_tensors", dict)
        stack.enter_context(mesh.observed_by(recorder))
        # What a strategy of the reader's own sends over a mesh of its own counts too.
        stack.enter_context(observing_new(recorder))
        if source_of(mesh) == "emulated":
            stack.enter_context(observing_new(_OverTheLink()))
        engine, pipeline = engine_of(config, strategy, mesh)
        stack.enter_context(engine)
        for hook in watch_units(engine.module, recorder, config.wrap_policy):
            stack.callback(hook.remove)
        run = RankRun(config, engine, recorder, pipeline)
        stack.callback(run.finite.remove)
        for unit in watched_modules(engine.module, config.wrap_policy).values():
            stack.callback(unit.register_forward_pre_hook(run.look_at_autocast).remove)
        recorder.live_tensors = run.live_tensors
        yield run


def meet(rank: int, config: CompareConfig | None = None) -> None:
    """Do nothing: ``pool.run`` returns when all ranks have, and been sent the configuration."""


def agree(rank: int, directory: Path) -> tuple[Path, Reading]:  # noqa: ARG001
    """This rank's directory, and its clock when all ranks have come here."""
    all_gather_bytes(b"")
    return directory, Reading.now()


def run_strategy(
    rank: int, config: CompareConfig, strategy: str, directory: Path, origins: Origins
) -> RankReport | None:
    """Train with one strategy on this rank and record it; None on a rank that does not take part.

    'single' trains on rank 0 alone, on the rows and with the cores of all ranks: it sees the same global batch.
    """
    alone = config.is_alone(strategy)
    if alone and rank > 0:
        return None
    with contextlib.ExitStack() as stack:
        if alone:
            # Those of all ranks, but no more than cores: threads that share one wait for each other in every layer.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(min(torch.get_num_threads() * config.ranks, num_cores()))
        mesh = stack.enter_context(mesh_of(config, strategy))
        stack.enter_context(seeded(f"{config.seed}/{rank}"))  # dropout, for example, draws the same in every run
        writer = RunWriter(directory, rank, strategy, source_of(mesh))
        run = stack.enter_context(recorded_run(config, strategy, mesh, writer, own_origin_ns(origins)))
        if config.ranks > 1 and isinstance(run.engine, Engine):
            stack.enter_context(run.loss.sends_over_its_mesh())
        first = 0 if config.resume is None else run.resume(checkpoint_directory(Path(config.resume), strategy))
        # Not the first step or two, in which optimizer state is still being allocated.
        traced = min(first + 2, config.steps - 1)
        report = run.report
        for step in range(first, config.steps):
            before = num_sent_by_torch()
            # Not in the traced step, whose peak is that of training; in a timed one only where there are others.
            reports_norm = step == first or (step == first + 1 and config.steps - first >= 5)
            trace = True if step == traced else None
            result = run.step(step, trace_memory=trace, reports_norm=reports_norm and step != traced)
            if config.inside(strategy) in config.own_strategies and num_sent_by_torch() != before:
                raise ValueError(f"strategies: {strategy!r} {PAST}")
            if sampled_at_rest(step) or step == config.steps - 1:
                report.did[step] = did(run.engine)
            if step in report.did or step - first < NUM_BATCHES:
                report.buffers[step] = sums_of(run.engine.module)
            if rank == 0:
                current().emit(Progress(strategy, step, result.loss))
            if config.save_every and ((step + 1) % config.save_every == 0 or step + 1 == config.steps):
                run.save(checkpoint_directory(directory.parents[1], strategy))
        run.recorder.write_shards(run.shards)
        report.padding_bytes = sum(one.layout.padding_numel * one.element_size for one in run.engine.divisions())
        report.recorder_share, report.not_finite, report.first = run.recorder.cost_share, run.finite.lost, run.first
        return report


class _OverTheLink(Observer):
    """Refuses what a strategy sends past the emulated link, in a group of its own."""

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        if not event.emulated:
            raise ValueError(
                f"link: {event.tag!r} is sent over axis {event.axis!r} of another mesh, on which no link is emulated; "
                "take communicators of given.mesh, by its split() and flatten()"
            )


def source_of(mesh: BaseMesh) -> str:
    """The ``source`` of records of a run on ``mesh``: measured, or over an emulated link."""
    return "emulated" if any(comm.emulated for comm in mesh.communicators) else "measured"


def mesh_of(config: CompareConfig, strategy: str) -> BaseMesh:
    """The mesh that a strategy trains on; made by all ranks together."""
    device = current().device
    if config.is_alone(strategy):
        return Mesh.alone(device)
    link = None if config.link is None else Link.parse(config.link)
    return Mesh(config.mesh_axes(strategy), device=device, link=link, transport=config.transport)


def engine_of(
    config: CompareConfig, run: str, mesh: BaseMesh, optimizer: OptimizerFn | None = None
) -> tuple[AnyEngine, Pipeline | None]:
    """The engine of a run, around a new model or this rank's stages; with the workload's optimizer, if no other."""
    workload, strategy, staged = config.trained, config.inside(run), config.staged_of(run)
    given = _own(config, strategy)
    options = config.engine_options(engine_options(strategy)) if given is None else {}
    model = workload.build(config.seed)
    if given is None and "init_fn" in engine_options(strategy) and config.tp == 1 and staged is None:
        # It makes what is on the meta device itself, unit by unit, so that no rank ever holds all of it.
        options["init_fn"] = workload.initialiser(config.seed)
        model = model if any(param.is_meta for param in model.parameters()) else model.to(mesh.device)
    else:
        model = workload.made(model, mesh.device, config.seed)
    if config.divides(strategy):
        model = divided(model, workload, mesh)
    options["broadcast_buffers"] = config.broadcasts_buffers(strategy)
    made = config.strategy(run)
    pipeline = None if staged is None or made is None else staged.pipeline(model, mesh, made.precision)
    trained = model if pipeline is None else pipeline.module
    return build_engine(given or strategy, trained, optimizer or workload.optimizer_of, mesh, **options), pipeline


def step_of(
    config: CompareConfig, engine: AnyEngine, pipeline: Pipeline | None, loss: LossFn, **named: Any
) -> TrainStep:
    """The training step of a whole model, or of a rank's stages; ``named`` are others of its arguments."""
    named |= {"accumulation": config.accumulation, "max_norm": config.clip}
    if pipeline is None:
        return TrainStep(engine, loss, **named)
    assert isinstance(engine, Engine)
    return PipelineStep(pipeline, engine, loss, **named)


def _own(config: CompareConfig, strategy: str) -> Strategy | None:
    """A strategy of the reader's own, with the buckets that ours have; None of one of ours."""
    if strategy not in config.own_strategies:
        return None
    own = deepcopy(config.own_strategies[strategy])  # in this process the reader has this one, and plans train others
    if takes_buckets(own):
        vars(own)["bucket_bytes"] = config.bucket_bytes
    return own


def _random_states(device: torch.device) -> tuple[object, ...]:
    """Of Python's, NumPy's and torch's generators, as values that can be compared."""
    if device.type != "cuda":
        return (generator_states(),)
    # Of numbers in host memory: nothing waits for the device.
    return generator_states(), torch.cuda.get_rng_state(device).numpy().tobytes()


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; the host goes on, which from memory that is not pinned it cannot."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
