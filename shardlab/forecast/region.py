"""How far the forecast of this very job may miss: as far as those of measured steps like it; or nothing is known.

Like a job are published steps of the same kind (``KINDS``) and of sizes within ``REACHES``. The error that is said is
that of the worst of them; fewer than ``LEAST_STEPS``, or steps of one laboratory alone, say nothing.

without a measured step   machines of one card differ as wholes: the error is no less than that of the machine whose
of one's own              median is missed by most
with measured steps       nothing is known unless one is like the job, all are of its card, and the fit meets each
                          within ``FAR``; where too few steps are like the job, those count that have another card or
                          other sizes than its work, and the error is no less than ``ELSEWHERE``

Hosts differ more than cards: a job whose device waits for its host is like steps that do, too, and no others, and of
these one laboratory has published enough: so nothing is known of them yet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isnan, log, nan
from statistics import median
from typing import Any

import pandas as pd

from shardlab.forecast.calibration import checked, fitted
from shardlab.forecast.job import Job
from shardlab.forecast.predict import FAR, MOST_SENT, may_retry, sent_share, waits_for_host
from shardlab.forecast.published import TOYS, Pair, PublishedStep, calibration_of, error_of, published_steps
from shardlab.forecast.step_model import Factors, Step, step_parts

# What 9 of 10 published steps are missed by at most without a calibration, whatever they are like, if each laboratory
# counts alike: two thirds of the steps are of one, and of all steps it would be 15 %, less than what is said of steps
# that are known. To forecast all of them again would make each answer wait for seconds.
USUAL_MISS = 0.26
OUTSIDE = "outside of what is known"
LEAST_STEPS, LEAST_LABORATORIES = 8, 2  # the worst of n others is exceeded by one in n + 1
# By how much a job may be missed at least where measured steps are less like it: of a laboratory that is left out, such
# steps were missed by 12.5 % at most.
ELSEWHERE = 0.13
HOW = {"known": "count", "held": "sum"}  # steps
WORK, CALIBRATES = "tokens of a micro-batch x width", 6.0  # by which factor the work of a calibration may differ


@cache
def _is_host_bound(job: Job) -> bool:
    return Step(job, Factors()).waits_for_host and waits_for_host(step_parts(job, Factors()))


# What has to be the same.
KINDS: tuple[Callable[[Job], str], ...] = (
    lambda job: job.card.name,
    lambda job: job.strategy if job.row.by_unit or job.row.parameters else "whole parameters",
    lambda job: "tensor parallelism" if job.tensor > 1 else "no tensor parallelism",
    lambda job: "compiled layers" if job.compiled else "layers that are not compiled",
    lambda job: f"{job.kernel} attention" if job.stores_scores else "attention in one kernel",
    lambda job: {"tf32": "32 bits", "fp8": "8 bits"}.get(job.precision, "16 bits"),
    lambda job: "an assumed network" if job.assumed_gigabits else "a known network",
    lambda job: "a nearly full memory" if may_retry(job) else "room in its memory",
    lambda job: "messages that compute hides" if sent_share(job) <= MOST_SENT else "messages beside little compute",
    lambda job: "a device that waits for its host" if _is_host_bound(job) else "a device that is busy",
)
# What has to be alike, and by which factor it may differ. The first is the work of a kernel.
REACHES: Mapping[str, tuple[Callable[[Job], float], float]] = {
    WORK: (lambda job: job.tokens * job.hidden / job.tensor, 2.0),
    "GPUs": (lambda job: job.data * job.tensor, 4.0),
    "parameters": (lambda job: job.num_params, 8.0),
    "tp": (lambda job: job.tensor, 2.0),
}


@dataclass(frozen=True)
class Miss:
    """By how much a forecast may miss.

    Attributes:
        share: of the seconds, in both directions; None where nothing is known.
        reason: what that stands on, or why nothing is known and what the nearest measured step is.
    """

    share: float | None
    reason: str


def expected_miss(
    job: Job, calibration: Sequence[Pair] = (), known: Callable[[PublishedStep], bool] | None = None,
) -> Miss:  # fmt: skip
    """By how much ``forecast_of(job, calibration)`` may miss, as those steps say that are ``known``: None for all."""
    pairs = checked(calibration, job)
    if pairs and (why_not := _does_not_calibrate(pairs, job)):
        return Miss(None, f"{OUTSIDE}: {why_not}")
    here, is_calibrated = Place.of(job), bool(pairs)
    measured = _measured(is_calibrated=is_calibrated)
    apart = {step: here.apart(place) for step, place in measured.items() if known is None or known(step)}
    nearest = min(apart, key=lambda step: apart[step])
    like = [step for step, (kinds, sizes, _) in apart.items() if kinds == sizes == 0]
    if is_akin := is_calibrated and not _say_enough(like):
        like = [step for step in apart if here.is_akin(measured[step])]
    if not _say_enough(like):
        return Miss(None, _unknown(job, nearest, like))
    errors = [abs(error_of(step, is_calibrated=is_calibrated)) for step in like]
    worst, machines = max(errors), len({step.machine for step in like})
    error = error_of(nearest, is_calibrated=is_calibrated)
    akin = " but for card or size" if is_akin else ""
    said = (
        f"{len(like)} measured steps like this one{akin}, of {machines} machine{'s' * (machines > 1)}, were missed by "
        f"{worst:.0%} at most, {median(errors):.0%} in the median; the nearest, {nearest.title}, is forecast "
        f"{abs(error):.1%} too {'long' if error > 0 else 'short'}"
    )
    machine, least = ("", ELSEWHERE * is_akin) if is_calibrated else _most_different(here, known)
    if machine and least > worst:
        said += f". Without a measured step of yours it may be {least:.0%}, by which {machine} is missed in the median"
    return Miss(max(worst, least), said)


def range_of(found: Any, share: float | None) -> tuple[float, float]:
    """Least and most seconds of a step, as its forecast or row of ``validate_published`` says, missed by this share.

    Where that is not known, None or NaN, by ``USUAL_MISS``.
    """
    miss = USUAL_MISS if share is None or isnan(share) else min(share, 0.9)
    return found.least_seconds / (1 + miss), found.most_seconds / (1 - miss)


def _say_enough(like: Sequence[PublishedStep]) -> bool:
    return len(like) >= LEAST_STEPS and len({step.laboratory for step in like}) >= LEAST_LABORATORIES


def _does_not_calibrate(pairs: tuple[tuple[Job, float], ...], job: Job) -> str:
    """Why measured steps say nothing of a job; empty where they do."""
    work, _ = REACHES[WORK]
    others = [number for number, (of, _) in enumerate(pairs) if of.card != job.card]
    if others:
        return f"calibration pair {', '.join(map(str, others))} is of another card than this job"
    if not any(
        (of.tensor > 1) == (job.tensor > 1) and 1 / CALIBRATES <= work(of) / work(job) <= CALIBRATES for of, _ in pairs
    ):
        return "no calibration pair is like this job in its size of work and its tensor parallelism"
    factors = fitted(pairs)
    missed = [number for number, (of, seconds) in enumerate(pairs) if _is_missed(of, seconds, factors)]
    return f"calibration pair {', '.join(map(str, missed))} is missed by over {FAR:.0%} after the fit" if missed else ""


@cache
def _is_missed(job: Job, seconds: float, factors: Factors) -> bool:
    return abs(step_parts(job, factors).total() / seconds - 1) > FAR


def by_laboratory(validated: pd.DataFrame) -> pd.DataFrame:
    """Misses by laboratory beside the toys', tensor parallelism apart, and whether they were known beforehand.

    Args:
        validated: what ``validate_published`` returns.

    Returns:
        ``laboratory``, ``tp``, ``steps`` that calibrate nothing; ``median``, ``p90`` and ``worst`` of their errors, and
        the same with ``raw_`` (without a calibration), ``constant_rate_`` and ``roofline_`` in front; ``known`` (of how
        many of them the steps of all other laboratories say an error) and ``held`` (how many of these are missed by no
        more), ``known_by_machines`` and ``held_by_machines`` (the same with those of all other machines); ``in_range``
        (how many took no less and no more than the range that is said of them, knowing no step of the laboratory).
    """
    owners: dict[str, Callable[[PublishedStep], str]] = {
        "": lambda step: step.laboratory, "_by_machines": lambda step: step.machine,
    }  # fmt: skip
    columns = {"": "error", "raw_": "raw_error", **{name.removesuffix("error"): name for name in TOYS}}
    rows = validated.assign(tp=validated["tp"] > 1, **validated[[*columns.values()]].abs())
    for name, owner in owners.items():
        rows[f"known{name}"] = [_share_without(step, owner) for step in published_steps()]
        rows[f"held{name}"] = rows["error"] <= rows[f"known{name}"]
    ends = [range_of(row, share) for row, share in zip(rows.itertuples(), rows["known"].to_list(), strict=True)]
    rows["in_range"] = rows["measured_seconds"].between([least for least, _ in ends], [most for _, most in ends])
    measures: dict[str, Any] = {"median": "median", "p90": lambda of: of.quantile(0.9), "worst": "max"}
    return rows[~rows["calibration"]].groupby(["laboratory", "tp"], as_index=False).agg(
        steps=("error", "size"), in_range=("in_range", "sum"),
        **{f"{front}{name}": (column, of) for front, column in columns.items() for name, of in measures.items()},
        **{f"{what}{name}": (f"{what}{name}", how) for name in owners for what, how in HOW.items()},
    )  # fmt: skip


def _share_without(step: PublishedStep, owner: Callable[[PublishedStep], Any], *, is_calibrated: bool = True) -> float:
    """What the steps of all other owners say of one; NaN where that is nothing."""
    calibration = calibration_of(step.machine) if is_calibrated else ()
    share = expected_miss(step.job, calibration, lambda other: owner(other) != owner(step)).share
    return nan if share is None else share


@dataclass(frozen=True)
class Place:
    """Where a job stands: its kinds, and the logarithms of its sizes in reaches."""

    kinds: tuple[str, ...]
    sizes: tuple[float, ...]

    @classmethod
    def of(cls, job: Job) -> "Place":
        """That of a job."""
        sizes = tuple(log(size(job)) / log(reach) for size, reach in REACHES.values())
        return cls(tuple(kind(job) for kind in KINDS), sizes)

    def apart(self, other: "Place") -> tuple[int, int, float]:
        """How many kinds differ, how many sizes are out of reach, and how far sizes are apart."""
        kinds = sum(one != two for one, two in zip(self.kinds, other.kinds, strict=True))
        sizes = [abs(one - two) for one, two in zip(self.sizes, other.sizes, strict=True)]
        return kinds, sum(size > 1 + 1e-9 for size in sizes), sum(sizes)

    def is_akin(self, other: "Place") -> bool:
        """Whether all but the card is of one kind, and kernels have as much work."""
        return self.kinds[1:] == other.kinds[1:] and abs(self.sizes[0] - other.sizes[0]) <= 1 + 1e-9


@cache
def _measured(*, is_calibrated: bool) -> Mapping[PublishedStep, Place]:
    """Steps whose forecasts stand on as much as that of the job, and are not fitted to them."""
    steps = published_steps()
    if is_calibrated:
        steps = tuple(step for step in steps if calibration_of(step.machine) and not step.calibrates)
    return {step: Place.of(step.job) for step in steps}


def _most_different(here: Place, known: Callable[[PublishedStep], bool] | None) -> tuple[str, float]:
    """Of the machines with this card, strategy and division, the one that presets miss by most, in its median."""
    by_machine: dict[str, list[float]] = {}
    for step, place in _measured(is_calibrated=False).items():
        if (known is None or known(step)) and place.kinds[:3] == here.kinds[:3]:
            by_machine.setdefault(step.machine, []).append(error_of(step, is_calibrated=False))
    machine = max(by_machine, key=lambda name: abs(median(by_machine[name])))
    return machine, abs(median(by_machine[machine]))


def _unknown(job: Job, nearest: PublishedStep, like: Sequence[PublishedStep]) -> str:
    if like:
        laboratories = ", ".join(sorted({step.laboratory for step in like}))
        many = "steps are" if len(like) > 1 else "step is"
        few = f"only {len(like)} measured {many} like this one, of {laboratories}"
        return f"{OUTSIDE}: {few}; the nearest is {nearest.title}"
    kinds = [(kind(nearest.job), kind(job)) for kind in KINDS]
    differences = [f"{theirs} (here {ours})" for theirs, ours in kinds if theirs != ours]
    for name, (size, reach) in REACHES.items():
        times = size(nearest.job) / size(job)
        if not 1 / reach <= times <= reach:
            differences.append(f"{times:.3g} times the {name}" if times > 1 else f"1/{1 / times:.3g} of the {name}")
    return f"{OUTSIDE}: the nearest measured step, {nearest.title}, differs: {', '.join(differences)}"
