"""From a ``BenchConfig`` to rows: our engines against torch's, on the same ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from shardlab.bench.config import BenchConfig, Pair, Workload
from shardlab.bench.rounds import FLOOR, OURS, THEIRS, RankTimes, RoundDone, time_pair
from shardlab.launch import RankPool
from shardlab.launch.checks import check_pool

PRELOAD = ("shardlab.bench.rounds", "torch._dynamo")
OnProgress = Callable[[RoundDone], None]


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


def bench(
    config: BenchConfig, *, pool: RankPool | None = None, on_progress: OnProgress | None = None
) -> Iterator[BenchRow]:
    """Time every pair on every workload; yield each row when it is done.

    Args:
        config: what to time.
        pool: warm ranks; None starts ranks and ends them.
        on_progress: called in this process after every round.

    Raises:
        ValueError: ``config`` asks for other ranks than ``pool`` has.
        RankError: a rank failed; see ``launch``.
    """
    if pool is not None:
        check_pool(pool, config.ranks, config.device)
        yield from _bench(config, pool, on_progress)
        return
    with RankPool(config.ranks, device=config.device, timeout_s=config.timeout_s, preload=PRELOAD) as own:
        yield from _bench(config, own, on_progress)


def _bench(config: BenchConfig, pool: RankPool, on_progress: OnProgress | None) -> Iterator[BenchRow]:
    def on_message(_: int, message: object) -> None:
        if on_progress is not None and isinstance(message, RoundDone):
            on_progress(message)

    for workload in config.workloads:
        for pair in config.pairs:
            rounds = config.rounds * workload.round_factor
            times = pool.run(time_pair, workload, pair, rounds, config.transport, on_message=on_message)
            yield row_of(workload, pair, times)


def row_of(workload: Workload, pair: Pair, times: Sequence[RankTimes]) -> BenchRow:
    """The row of one pair from the times of all ranks; a step lasts until the slowest rank has ended it."""
    slowest = {name: _slowest([own.step_ns[name] for own in times]) for name in (OURS, THEIRS, FLOOR)}
    ratios = _ratios(slowest[OURS], slowest[THEIRS])
    q1, middle, q3 = quantiles(ratios, n=4, method="inclusive")
    ours_peak, theirs_peak = (max(own.peak_bytes[name] for own in times) for name in (OURS, THEIRS))
    return BenchRow(
        workload=workload.name,
        ranks=len(times),
        ours=pair.ours.name,
        theirs=pair.theirs.name,
        ratio_median=middle,
        ratio_q1=q1,
        ratio_q3=q3,
        peak_ratio=ours_peak / theirs_peak,
        ours_ms=median(slowest[OURS]) / 1e6,
        theirs_ms=median(slowest[THEIRS]) / 1e6,
        floor_ms=median(slowest[FLOOR]) / 1e6,
        ours_over_floor=median(_ratios(slowest[OURS], slowest[FLOOR])),
        theirs_over_floor=median(_ratios(slowest[THEIRS], slowest[FLOOR])),
        ours_peak_bytes=ours_peak,
        theirs_peak_bytes=theirs_peak,
        rounds=len(ratios),
        transport=times[0].transport,
    )


def _ratios(times: Sequence[int], others: Sequence[int]) -> list[float]:
    return [one / other for one, other in zip(times, others, strict=True)]


def _slowest(by_rank: Sequence[Sequence[int]]) -> list[int]:
    return [max(same) for same in zip(*by_rank, strict=True)]
