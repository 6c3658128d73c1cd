"""Which way to train a transformer on so many GPUs is fastest, and why each other falls out.

Every strategy, division by tensor parallelism, micro-batch, recomputation and way of accumulating that gives the wanted
batch gets the seconds and the peak of ``predict_step``. Of several micro-batches each reduces its gradients, which then
are sharded in between; or only the last does, the others run in ``no_sync()``, and gradients add up whole on every
rank. Where they are whole anyway (ddp, bucketed, zero1) ``no_sync()`` costs no byte, and is the only way.

A way fits where the allocator's usual reserve (``RESERVE``) is free beside its tensors. What fits without it is tight:
torch's allocator empties its cache then, or finds no room. Those that fit are ranked by time; but of ways that are at
most ``NEAR`` slower than the fastest, which forecasts of two ways of one job cannot tell apart, the one that needs
least memory is first, and of equal memory the simplest. What is slower by no more than a forecast misses is a tie.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from math import log
from typing import Any

from shardlab.forecast.calibration import checked, fitted
from shardlab.forecast.job import Job
from shardlab.forecast.peak import peak_bytes
from shardlab.forecast.predict import USABLE
from shardlab.forecast.published import Pair, PublishedStep, calibration_of, published_steps
from shardlab.forecast.region import USUAL_MISS, expected_miss
from shardlab.forecast.replay import REPLAYED
from shardlab.forecast.step_model import Factors, step_parts
from shardlab.forecast.transformer import Parts
from shardlab.planner.rows import ROWS

STRATEGIES = tuple(name for name in REPLAYED if not ROWS[name].alone)
RECOMPUTES: tuple[int | str, ...] = (0, "selective", "full")
TENSORS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Reserved over allocated bytes, in the median of seven published runs of FSDP: 1.20, 1.26, 1.27, 1.27, 1.35, 1.36, 1.36
# (llama-cookbook PR #41, torchtitan PR #135 and #165).
RESERVE = 1.27
MOST_CARDS = 65536
OPTIONS = {
    "strategy": "--strategy", "tensor": "--tp", "micro_batch": "--micro-batch", "recompute": "--recompute",
    "no_sync": "--no-sync",
}  # fmt: skip
# Shares of seconds and of bytes. By how much one way is slower than another is missed by 3.4 % in the median of 510
# pairs of published steps that train one job.
NEAR, NEAR_BYTES = 0.03, 0.05


@dataclass(frozen=True)
class Found:
    """One way to train.

    Attributes:
        job: the way.
        peak_bytes: of a rank, in tensors.
        factors: of the cluster, as measured steps say.
        why_not: empty for the fastest that fits; else why it falls out.
        is_tied: whether it fits, and is slower than the fastest by no more than a forecast misses.
    """

    job: Job
    peak_bytes: float
    factors: Factors
    why_not: str = ""
    is_tied: bool = False

    @cached_property
    def parts(self) -> Parts:
        """What a step is spent on, in seconds; replayed for who asks, since most ways of a large model do not fit."""
        return step_parts(self.job, self.factors)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.parts.total()

    @property
    def fits(self) -> bool:
        """With the allocator's usual reserve."""
        return RESERVE * self.peak_bytes <= self.job.card.memory_bytes


def search(sizes: Mapping[str, Any], ranks: int, sequences: int, **options: Any) -> list[Found]:
    """All ways, those that fit first, as ``ranked``, then those that do not, by memory.

    Args:
        sizes: hidden, layers, heads, kv_heads, ffn, vocab, seq_len and perhaps gated, see ``predict_step``.
        ranks: GPUs.
        sequences: of a step, over all GPUs.
        options: ``hardware``, ``network``, ``precision``, ``compiled``, ``attention``, ``sequence_parallel``,
            ``states``, ``calibration``.

    Raises:
        ValueError: an argument is not allowed, or nothing divides so.
    """
    calibration = options.pop("calibration", ())
    jobs = list(_jobs(sizes, ranks, sequences, options))
    if not jobs:
        raise ValueError(
            f"batch: {sequences} sequences a step cannot be divided over {ranks} ranks; give a multiple of data ranks"
        )
    factors = fitted(checked(calibration, jobs[0]))  # all are on the same cards and network
    found = [Found(job, peak_bytes(job), factors) for job in jobs]
    fits = ranked([one for one in found if one.fits])
    found.sort(key=lambda one: one.peak_bytes)
    too_large = [replace(one, why_not=_too_large(one)) for one in found if not one.fits]
    if not fits:
        return too_large
    best = fits[0]
    tied = best.seconds * (1 + miss_of(best.job, calibration))
    told = [replace(one, is_tied=one.seconds <= tied) for one in fits]
    return [*(replace(one, why_not=_slower(one, best)) for one in told), *too_large]


def next_to_try(job: Job, calibration: Sequence[Pair] = ()) -> tuple[str, Found] | None:
    """The fastest way that fits and differs from a job in one option, which is named; None if that gains nothing.

    The same sequences make a step. A job that fits itself gains if it is faster by more than ``NEAR``.
    """
    factors = fitted(checked(calibration, job))
    others = _jobs(_given(job), job.data * job.tensor, job.sequences, {})
    ways = {job: "", **{way: _only_option(job, way) for way in others}}
    ways |= {} if job.compiled else {replace(job, compiled=True): "--compiled"}
    found = [Found(way, peak_bytes(way), factors) for way in ways if way is job or ways[way]]
    here, fits = found[0], [way for way in found[1:] if way.fits]
    best = min(fits, key=lambda way: way.seconds, default=here)
    gains = not here.fits or best.seconds * (1 + NEAR) < here.seconds
    return (ways[best.job], best) if best is not here and gains else None


def cards_for(job: Job) -> Job | None:
    """The smallest way to train what a job trains on as many cards, or on the fewest, as ``cards_that_would_do``."""
    given, ranks = _given(job), job.data * job.tensor
    return _smallest(given, ranks, {}) or cards_that_would_do(given, ranks)


def _given(job: Job) -> dict[str, Any]:
    """What is not a way to train it."""
    return {name: value for name, value in asdict(job).items() if name not in (*OPTIONS, "data", "accumulation")}


def _only_option(job: Job, way: Job) -> str:
    """The option that makes a way of a job; empty if more than one does, or none."""
    changed = [name for name in OPTIONS if getattr(way, name) != getattr(job, name)]
    if len(changed) > 1 and job.strategy != way.strategy and "single" in (job.strategy, way.strategy):
        changed.remove("strategy")  # it follows from the number of data ranks
    (*others, last) = changed or [""]
    return "" if others or not last else _option(way, last) or f"without {OPTIONS[last]}"


def options_of(job: Job) -> str:
    """The options that make a way of so many GPUs."""
    return " ".join(filter(None, (f"--batch {job.sequences}", *(_option(job, name) for name in OPTIONS))))


def _option(job: Job, name: str) -> str:
    value = getattr(job, name)
    return (OPTIONS[name] if value is True else f"{OPTIONS[name]} {value}") if value else ""


def ranked(found: Sequence[Found]) -> list[Found]:
    """By time; those near the fastest by memory, then simplicity: little that is divided or computed twice."""
    near = (1 + NEAR) * min((one.seconds for one in found), default=0.0)

    def place(one: Found) -> tuple[float, ...]:
        if one.seconds > near:
            return (one.seconds,)
        job = one.job
        order = REPLAYED.index(job.strategy)
        return 0.0, round(log(one.peak_bytes) / NEAR_BYTES), job.tensor, bool(job.recompute), order, one.seconds

    return sorted(found, key=place)


def published_regrets() -> list[float]:
    """How much slower the way that is ranked first is than the fastest, of published jobs with several ways."""
    jobs: dict[Any, list[PublishedStep]] = {}
    for step in published_steps():
        of = step.job
        same = step.machine, of.num_params, of.seq_len, of.tokens_per_step, of.data * of.tensor, of.compiled
        jobs.setdefault(same, []).append(step)
    regrets = []
    for steps in jobs.values():
        ways = {step.job: step for step in steps}
        found = [
            Found(job, peak_bytes(job), fitted(checked(calibration_of(step.machine), job)))
            for job, step in ways.items()
        ]
        if len(found) > 1:
            regrets.append(ways[ranked(found)[0].job].seconds / min(step.seconds for step in steps) - 1)
    return regrets


def miss_of(job: Job, calibration: Sequence[Pair]) -> float:
    """By which share of its seconds a forecast may miss; where nothing is known, what 9 of 10 published steps are."""
    share = expected_miss(job, calibration).share
    return USUAL_MISS if share is None else share


def cards_that_would_do(sizes: Mapping[str, Any], ranks: int, **options: Any) -> Job | None:
    """The smallest way on the fewest cards, of more than ``ranks``, on which one fits with a sequence a card.

    Cards are counted by whole hosts, where there are several. None where no number of them is enough.
    """
    host = next(_jobs(sizes, ranks, ranks, options)).links.per_host
    counts = [many for many in range(ranks + 1, MOST_CARDS + 1) if many <= host or many % host == 0]
    place = bisect_left(counts, True, key=lambda many: _smallest(sizes, many, options) is not None)
    return _smallest(sizes, counts[place], options) if place < len(counts) else None


def _smallest(sizes: Mapping[str, Any], ranks: int, options: Mapping[str, Any]) -> Job | None:
    job = min(_jobs(sizes, ranks, ranks, options), key=peak_bytes)
    return job if RESERVE * peak_bytes(job) <= job.card.memory_bytes else None


def _jobs(sizes: Mapping[str, Any], ranks: int, sequences: int, options: Mapping[str, Any]) -> Iterator[Job]:
    for tensor, micro_batch in product(TENSORS, MICRO_BATCHES):
        data, others = divmod(ranks, tensor)
        if others or sizes["heads"] % tensor or sizes["ffn"] % tensor or sequences % (data * micro_batch):
            continue
        base = Job(
            **sizes, micro_batch=micro_batch, data=data, accumulation=sequences // data // micro_batch,
            tensor=tensor, strategy="fsdp" if data > 1 else "single", **options,
        )  # fmt: skip
        if tensor > base.links.per_host:
            continue
        for recompute, strategy in product(RECOMPUTES, STRATEGIES if data > 1 else ("single",)):
            if ROWS[strategy].outer is not None and (data <= base.per_host or data % base.per_host):
                continue
            for no_sync in _accumulates(strategy, base.accumulation):
                yield replace(base, strategy=strategy, recompute=recompute, no_sync=no_sync)


def _accumulates(strategy: str, micro_batches: int) -> tuple[bool, ...]:
    """Whether in ``no_sync()``: of each way that is worth a try."""
    if micro_batches == 1 or ROWS[strategy].alone:
        return (False,)
    return (False, True) if ROWS[strategy].gradients else (True,)


def _slower(found: Found, best: Found) -> str:
    if found.job is best.job:
        return ""
    more = {name: seconds - best.parts.get(name, 0.0) for name, seconds in found.parts.items()}
    most, share = max(more, key=lambda name: more[name]), found.seconds / best.seconds - 1
    said = f"{share:.0%} slower: {more[most]:.2g} s more of {most}" if share > 1e-9 else "as fast"
    return f"a tie, {said}" if found.is_tied else said


def _too_large(found: Found) -> str:
    need, room = found.peak_bytes, found.job.card.memory_bytes
    if need <= USABLE * room:
        return f"tight: fits if the allocator reserves less than {room / need:.2f} times its tensors"
    return f"needs {need / 1e9:.0f} GB, and {USABLE * room / 1e9:.0f} GB can be used"
