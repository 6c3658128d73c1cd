"""How far the forecast of this very job may miss: as far as those of measured steps like it; or nothing is known.

Like a job are published steps of the same kind (``KINDS``) and of sizes within ``REACHES``. The error that is said is
that of the worst of them; fewer than ``LEAST_STEPS`` say nothing. Of the published steps themselves, 94 % are missed by
no more than the worst of the others that are like them. Without a measured step of one's own, machines of one card
differ as wholes: so the error is then no less than that of the machine whose median is missed by most. With one that is
less like the job than those that calibrate published steps, nothing is known: it may move the forecast anywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from statistics import median
from typing import Any

from shardlab.forecast.calibration import checked
from shardlab.forecast.job import Job
from shardlab.forecast.predict import may_retry
from shardlab.forecast.published import PublishedStep, calibration_of, error_of, published_steps

LEAST_STEPS = 3
WORK, CALIBRATES = "tokens of a micro-batch x width", 6.0  # by which factor the work of a calibration may differ
# What has to be the same.
KINDS: tuple[Callable[[Job], str], ...] = (
    lambda job: job.card.name,
    lambda job: job.strategy,
    lambda job: f"tp {job.tensor}",
    lambda job: "compiled layers" if job.compiled else "layers that are not compiled",
    lambda job: "unfused attention" if job.kernel == "unfused" else "attention in one kernel",
    lambda job: "32 bits" if job.itemsize == 4 else "16 bits",
    lambda job: "an assumed network" if job.assumed_gigabits else "a known network",
    lambda job: "a nearly full memory" if may_retry(job) else "room in its memory",
)
# What has to be alike, and by which factor it may differ. The first is the work of a kernel: below what was measured
# the host sets the pace, which no forecast here knows.
REACHES: Mapping[str, tuple[Callable[[Job], float], float]] = {
    WORK: (lambda job: job.tokens * job.hidden / job.tensor, 2.0),
    "GPUs": (lambda job: job.data * job.tensor, 4.0),
    "parameters": (lambda job: job.num_params, 8.0),
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


def expected_miss(job: Job, calibration: Sequence[tuple[Mapping[str, Any], float]] = ()) -> Miss:
    """By how much ``forecast_of(job, calibration)`` may miss."""
    pairs, is_calibrated = checked(calibration, job), bool(calibration)
    if unlike := [str(number) for number, (of, _) in enumerate(pairs) if not _calibrates(of, job)]:
        return Miss(
            None,
            f"nothing known: calibration pair {', '.join(unlike)} is of another card, tp or size of work than this job",
        )
    here = Place.of(job)
    apart = {step: here.apart(place) for step, place in _measured(is_calibrated=is_calibrated).items()}
    nearest = min(apart, key=lambda step: apart[step])
    like = [step for step, (kinds, sizes, _) in apart.items() if kinds == sizes == 0]
    if len(like) < LEAST_STEPS:
        return Miss(None, _unknown(job, nearest, len(like)))
    errors = [abs(error_of(step, is_calibrated=is_calibrated)) for step in like]
    worst, machines = max(errors), len({step.machine for step in like})
    said = (
        f"{len(like)} measured steps like this one, of {machines} machine{'s' * (machines > 1)}, were missed by "
        f"{worst:.0%} at most, {median(errors):.0%} in the median; the nearest, {nearest.title}, is forecast "
        f"{_by(error_of(nearest, is_calibrated=is_calibrated))}"
    )
    machine, least = ("", 0.0) if is_calibrated else _most_different(here)
    if least > worst:
        said += f". Without a measured step of yours it may be {least:.0%}, by which {machine} is missed in the median"
    return Miss(max(worst, least), said)


def _calibrates(of: Job, job: Job) -> bool:
    work, _ = REACHES[WORK]
    same = (of.card, of.tensor) == (job.card, job.tensor)
    return same and 1 / CALIBRATES <= work(of) / work(job) <= CALIBRATES


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


@cache
def _measured(*, is_calibrated: bool) -> Mapping[PublishedStep, Place]:
    """Steps whose forecasts stand on as much as that of the job, and are not fitted to them."""
    steps = published_steps()
    if is_calibrated:
        steps = tuple(step for step in steps if calibration_of(step.machine) and not step.calibrates)
    return {step: Place.of(step.job) for step in steps}


def _most_different(here: Place) -> tuple[str, float]:
    """Of the machines with this card, strategy and division, the one that presets miss by most, in its median."""
    by_machine: dict[str, list[float]] = {}
    for step, place in _measured(is_calibrated=False).items():
        if place.kinds[:3] == here.kinds[:3]:
            by_machine.setdefault(step.machine, []).append(error_of(step, is_calibrated=False))
    machine = max(by_machine, key=lambda name: abs(median(by_machine[name])))
    return machine, abs(median(by_machine[machine]))


def _unknown(job: Job, nearest: PublishedStep, like: int) -> str:
    if like:
        few = f"only {like} measured {'steps are' if like > 1 else 'step is'} like this one"
        return f"nothing known: {few}; the nearest is {nearest.title}"
    kinds = [(kind(nearest.job), kind(job)) for kind in KINDS]
    differences = [f"{theirs} (here {ours})" for theirs, ours in kinds if theirs != ours]
    for name, (size, reach) in REACHES.items():
        times = size(nearest.job) / size(job)
        if not 1 / reach <= times <= reach:
            differences.append(f"{times:.3g} times the {name}")
    return f"nothing known: the nearest measured step, {nearest.title}, differs: {', '.join(differences)}"


def _by(error: float) -> str:
    return f"{abs(error):.1%} too {'long' if error > 0 else 'short'}"
