"""Our engines against torch's own, in the same ranks, a step of each in turn.

There are three workloads because an engine can lose time in three ways: by slowing compute down, by sending slowly, and
by its cost per message, however small. Torch's engines run at their best: DDP has a static graph,
``ZeroRedundancyOptimizer`` broadcasts whole buckets, and ``fully_shard`` keeps the root gathered after forward, as it
does by default. The pair "itself" is one engine against the same: how far its ratio lies from 1 is what a ratio means
here. ``floor`` is the same training on every rank alone, without communication.

A machine has slow phases of up to a factor of two. Engines that take turns share them, so the ratio of two neighbouring
steps is far steadier than the times. A step depends on the caches that the step before it left, so the rounds go
through all orders: an engine that was always in the middle was 1.4 % faster than the same engine at the ends. The place
of an engine in memory matters too (the same engine twice, each built once: ratios from 0.99 to 1.03), so after a
session of six rounds the engines are built again, in another order. A barrier comes before every step, and a step lasts
until the slowest rank has ended it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import permutations, product
from statistics import median, quantiles
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

from shardlab.bench.turns import Contender, Workload, turn_of
from shardlab.comm.mesh import Mesh
from shardlab.field_types import check_types
from shardlab.launch import RankPool, current
from shardlab.launch.placement import check_ranks
from shardlab.models import MODELS, GPTConfig

QUICK_ROUNDS, FULL_ROUNDS = 6, 42  # three engines have six orders: one session, or seven
OURS, THEIRS, FLOOR = "ours", "theirs", "floor"
TIMEOUT_S = 300.0  # a collective that takes longer ends the bench
PRELOAD = ("shardlab.bench.against_torch", "torch._dynamo")


@dataclass(frozen=True)
class Pair:
    """One of our engines and its counterpart in torch, or an engine twice."""

    ours: Contender
    theirs: Contender

    @property
    def name(self) -> str:
        """The name of our side."""
        return self.ours.name


# Torch's engines get torch's plain process groups, so that observing them costs no time.
_UNOBSERVED = MappingProxyType({"observed": False})


def _pair(ours: str, theirs: str, **at_its_best: Any) -> Pair:
    return Pair(Contender(ours, ours), Contender(theirs, theirs, {**_UNOBSERVED, **at_its_best}))


def chosen(field_name: str, names: Sequence[str], known: Mapping[str, Any]) -> tuple[Any, ...]:
    """The named entries of a table.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{field_name}: {unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(known[name] for name in names)


_WORKLOADS = (
    Workload("compute", "gpt-30m", rows=4, seq_len=128),
    Workload("communication", "gpt-30m", rows=1, seq_len=32),
    Workload("latency", "gpt-1m", rows=4, seq_len=64, round_factor=4),
)
_PAIRS = (
    _pair("bucketed", "torch_ddp"),
    # One message per owner instead of one per parameter.
    _pair("zero1", "torch_zero1", parameters_as_bucket_view=True),
    # None is fully_shard's own default: the root, which backward begins with, is not gathered again.
    _pair("fsdp", "torch_fsdp2", reshard_after_forward=None),
    Pair(
        Contender("tensor_parallel", "single", over_tensor=True, parallelized=True),
        Contender("torch_tp", "torch_tp", _UNOBSERVED, over_tensor=True),
    ),
    Pair(Contender("pipeline", "ddp", over_pipe=True), Contender("torch_pipeline", "torch_pipeline", over_pipe=True)),
    Pair(Contender("itself", "bucketed"), Contender("bucketed", "bucketed")),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload for workload in _WORKLOADS})
PAIRS: Mapping[str, Pair] = MappingProxyType({pair.name: pair for pair in _PAIRS})


@dataclass(frozen=True)
class BenchConfig:
    """A whole bench.

    Attributes:
        ranks: number of ranks; one alone shows what an engine costs apart from communication.
        rounds: timed steps of each engine, at least 2.
        workloads: see ``WORKLOADS``.
        pairs: see ``PAIRS``.
        device: auto, cpu or cuda.
        transport: transport of our engines: 'shared_memory' or 'gloo', not where ranks send by NCCL; None for the
            first that works. Torch's always use gloo or NCCL, so 'gloo' compares the engines alone.

    Raises:
        ValueError: a field has an invalid value; the message names the field and the allowed values.
    """

    ranks: int = 2
    rounds: int = QUICK_ROUNDS
    workloads: tuple[Workload, ...] = _WORKLOADS
    pairs: tuple[Pair, ...] = _PAIRS
    device: str = "auto"
    transport: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, besides=("workloads", "pairs"))
        for name, least in (("ranks", 1), ("rounds", 2)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"{name}: {number} is below {least}")
        for name in ("workloads", "pairs"):
            names = [entry.name for entry in getattr(self, name)]
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{name}: {', '.join(names) or 'none'}; at least one is needed, and each only once")
        check_ranks(self.ranks, self.device, [pair.theirs.strategy for pair in self.pairs], self.transport)
        for pair, workload in product(self.pairs, self.workloads):
            sizes = MODELS[workload.model]
            if pair.ours.over_tensor and (not isinstance(sizes, GPTConfig) or sizes.kv_heads % self.ranks):
                raise ValueError(
                    f"ranks: {self.ranks} ranks do not divide the heads of {workload.model}; leave out {pair.name!r}"
                )
            if pair.ours.over_pipe and (not isinstance(sizes, GPTConfig) or self.ranks > sizes.num_layers):
                raise ValueError(
                    f"ranks: {workload.model} is not cut into {self.ranks} stages; leave out {pair.name!r}"
                )

    @property
    def num_rounds(self) -> int:
        """Number of rounds over all workloads and pairs, for a progress bar."""
        return len(self.pairs) * sum(self.rounds * workload.round_factor for workload in self.workloads)


@dataclass(frozen=True)
class BenchRow:
    """One pair on one workload; a ratio below 1 means that ours is better.

    Attributes:
        workload: its name.
        ranks: number of ranks.
        ours: our engine, or 'itself': the engine on the other side once more.
        theirs: torch's.
        ratio_median: ratio of the time of our step to theirs in the same round, median over the rounds.
        ratio_q1: first quartile of these ratios.
        ratio_q3: third quartile.
        peak_ratio: our peak of live bytes over theirs, on the rank where each is highest.
        ours_ms: median time of our step.
        theirs_ms: median time of their step.
        floor_ms: median time of a step in which each rank trains the whole model alone, without communication. (Under
            tensor parallelism a rank does only part of that work and can be faster.)
        ours_over_floor: ratio of the time of our step to the floor in the same round, median.
        theirs_over_floor: likewise of theirs.
        ours_peak_bytes: our peak.
        theirs_peak_bytes: theirs.
        rounds: number of timed steps of each.
        transport: transport of our engines, empty for one rank; torch's always use NCCL or gloo.
    """

    workload: str
    ranks: int
    ours: str
    theirs: str
    ratio_median: float
    ratio_q1: float
    ratio_q3: float
    peak_ratio: float
    ours_ms: float
    theirs_ms: float
    floor_ms: float
    ours_over_floor: float
    theirs_over_floor: float
    ours_peak_bytes: int
    theirs_peak_bytes: int
    rounds: int
    transport: str


def bench(config: BenchConfig, *, on_progress: Callable[[str], None] = lambda _: None) -> Iterator[BenchRow]:
    """Time every pair on every workload, on ranks of its own; yield each row when it is done.

    Args:
        config: what to time.
        on_progress: called in this process after every round, with the names of workload and pair.

    Raises:
        RankError: a rank failed; see ``launch``.
    """

    def on_message(_: int, done: object) -> None:
        on_progress(str(done))

    with RankPool(config.ranks, device=config.device, timeout_s=TIMEOUT_S, preload=PRELOAD) as pool:
        for workload, pair in product(config.workloads, config.pairs):
            rounds = config.rounds * workload.round_factor
            times = pool.run(time_pair, workload, pair, rounds, config.transport, on_message=on_message)
            yield row_of(workload, pair, times)


@dataclass(frozen=True)
class RankTimes:
    """What a rank measures.

    Attributes:
        step_ns: time of every step of 'ours', 'theirs' and 'floor'.
        peak_bytes: of 'ours' and 'theirs' the highest live bytes of one step: torch's storages and the scratch of
            transports; memory outside torch is left out on both sides: shared memory, and gloo's own buffers.
        transport: transport of our engine.
    """

    step_ns: dict[str, list[int]]
    peak_bytes: dict[str, int]
    transport: str


def row_of(workload: Workload, pair: Pair, times: Sequence[RankTimes]) -> BenchRow:
    """The row of one pair from the times of all ranks; a step lasts until the slowest rank has ended it."""
    by_rank = ([own.step_ns[name] for own in times] for name in (OURS, THEIRS, FLOOR))
    ours, theirs, floor = ([max(same) for same in zip(*each, strict=True)] for each in by_rank)
    q1, middle, q3 = quantiles(_ratios(ours, theirs), n=4, method="inclusive")
    ours_peak, theirs_peak = (max(own.peak_bytes[name] for own in times) for name in (OURS, THEIRS))
    return BenchRow(
        workload=workload.name, ranks=len(times), ours=pair.ours.name, theirs=pair.theirs.name, ratio_median=middle,
        ratio_q1=q1, ratio_q3=q3, peak_ratio=ours_peak / theirs_peak, ours_ms=median(ours) / 1e6,
        theirs_ms=median(theirs) / 1e6, floor_ms=median(floor) / 1e6, ours_over_floor=median(_ratios(ours, floor)),
        theirs_over_floor=median(_ratios(theirs, floor)), ours_peak_bytes=ours_peak, theirs_peak_bytes=theirs_peak,
        rounds=len(ours), transport=times[0].transport,
    )  # fmt: skip


def _ratios(times: Sequence[int], others: Sequence[int]) -> list[float]:
    return [one / other for one, other in zip(times, others, strict=True)]


def time_pair(rank: int, workload: Workload, pair: Pair, rounds: int, transport: str | None) -> RankTimes:
    """Time both engines of a pair and the floor on this rank, in turns."""
    device, num_ranks = current().device, current().world_size
    contenders = {OURS: pair.ours, THEIRS: pair.theirs, FLOOR: None}
    # First, one engine at a time: a peak must not contain the memory of the engines that are timed below.
    peaks = {OURS: _peak_bytes(pair.ours, workload, transport), THEIRS: _peak_bytes(pair.theirs, workload, transport)}
    step_ns: dict[str, list[int]] = {name: [] for name in contenders}
    with Mesh({"data": num_ranks}, device=device, transport=transport) as mesh:
        for orders in sessions(rounds):
            with ExitStack() as stack:
                turns = {
                    name: stack.enter_context(turn_of(contenders[name], workload, transport)) for name in orders[-1]
                }
                for turn in turns.values():  # with all engines in memory, as in the rounds that count
                    turn.warm_up()
                for order in orders:
                    for name in order:
                        mesh.data.barrier().wait()
                        began_ns = perf_counter_ns()
                        turns[name].step()
                        step_ns[name].append(perf_counter_ns() - began_ns)
                    if rank == 0:
                        current().emit(f"{workload.name}: {pair.name}")
        return RankTimes(step_ns, peaks, mesh.data.transport)


def sessions(rounds: int) -> Iterator[list[tuple[str, ...]]]:
    """For each session the orders of its rounds: all orders, each time starting with another one."""
    orders = list(permutations((OURS, THEIRS, FLOOR)))
    for number, done in enumerate(range(0, rounds, len(orders))):
        start = number % len(orders)
        yield (orders[start:] + orders[:start])[: rounds - done]


def _peak_bytes(contender: Contender, workload: Workload, transport: str | None) -> int:
    """Peak of this engine alone, in an observed group: what torch's transport holds counts too."""
    observed = {name: True for name in contender.options if name == "observed"}
    listened_to = replace(contender, options={**contender.options, **observed})
    with turn_of(listened_to, workload, transport) as turn:
        turn.warm_up()
        return turn.peak_bytes()
