"""What measured steps of a cluster say of it: how its compute, its host, its links, its attention differ from presets.

    least squares of  ln(predicted / measured) / 0.04,  ln(compute) / 0.3,  ln(host) / 0.5,  ln(between) / 0.7,
    ln(attention) / 0.15

The last four are what is believed before, and 0.04 is by how much a pair is expected to be missed however it is
fitted. They keep a factor near 1 that the pairs do not tell apart from the others, such as the links of steps on one
host, or the host's where no step waits for it. There is one factor more than pairs, in this order: one pair fits
compute and host, two also the links between hosts, three also attention, which moves only if their rows differ much in
length.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, isfinite, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.forecast.job import Job
from shardlab.forecast.step_model import Factors, step_parts

MOST_PAIRS = 3
ERROR = 0.04
WIDTHS = np.array((0.3, 0.5, 0.7, 0.15))
ROUNDS, ENOUGH = 12, 1e-4
Vector = NDArray[np.float64]


def checked(calibration: Sequence[tuple[Mapping[str, Any], float]], job: Job) -> tuple[tuple[Job, float], ...]:
    """The pairs as jobs; hardware, network and precision are those of ``job`` where a pair does not say.

    Raises:
        ValueError: there are more than three, or one is no pair of arguments and seconds above 0.
    """
    if len(calibration) > MOST_PAIRS:
        raise ValueError(f"calibration: {len(calibration)} pairs are given; at most {MOST_PAIRS} are allowed")
    found = []
    for number, (arguments, seconds) in enumerate(calibration):
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(f"calibration: pair {number} has {seconds} seconds; they must be finite and above 0")
        like = {"hardware": job.hardware, "network": job.network, "precision": job.precision}
        given = {**like, **{name: value for name, value in arguments.items() if value is not None}}
        try:
            found.append((Job(**given), float(seconds)))
        except TypeError as error:  # an argument too many, or one that is missing
            raise ValueError(f"calibration: pair {number}: {error}; see predict_step") from None
    return tuple(found)


@lru_cache(maxsize=32)  # who forecasts many steps of a cluster asks with the same pairs
def fitted(pairs: tuple[tuple[Job, float], ...]) -> Factors:
    """The factors that the pairs speak for; all 1 without pairs."""
    if not pairs:
        return Factors()
    at = np.zeros(1 + len(pairs))
    misses = _misses(pairs, at)
    for _ in range(ROUNDS):
        slopes = np.column_stack([(_misses(pairs, at + step) - misses) / 1e-3 for step in 1e-3 * np.eye(len(at))])
        move = np.linalg.lstsq(slopes, -misses)[0]
        # The replay has kinks, behind which a whole move may be too far.
        trials = [(at + move * part, _misses(pairs, at + move * part)) for part in (1.0, 0.5, 0.25, 0.06)]
        best, best_misses = min(trials, key=lambda trial: float(trial[1] @ trial[1]))
        gain = misses @ misses - best_misses @ best_misses
        if gain > 0:
            at, misses = best, best_misses
        if gain < ENOUGH:
            break
    return _factors(at)


def _factors(at: Vector) -> Factors:
    return Factors(*(exp(value) for value in at.clip(-3, 3)))


def _misses(pairs: Sequence[tuple[Job, float]], at: Vector) -> Vector:
    """By how many widths the pairs and the beliefs are missed."""
    errors = [log(step_parts(job, _factors(at)).total() / seconds) / ERROR for job, seconds in pairs]
    return np.array([*errors, *(at / WIDTHS[: len(at)])])
