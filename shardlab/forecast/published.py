"""Steps that others have published, ``data/published_steps.csv``, and by how much their forecasts miss.

Each has its source and what had to be assumed. Which of them calibrate follows a rule: the first of every machine with
more than two, and of the ZeRO-3 machine the last too, since its links are part of the question. A machine with fewer
has none, and its forecasts stand on the presets.

Those that are not held out were in sight while the terms of the forecast were written; what was chosen on them is said
in ``gpu`` and ``transformer``. So their errors are those of a fit with few free numbers. Steps that are held out
came when the formulas stood, and no second of a forecast was chosen on them; the odd ones among them are kept.

Beside a forecast stand two toys that it has to beat:

    constant rate    seconds = FLOPs of the model / (MFU x peak), one number from the calibration rows
    roofline         seconds = max(FLOPs with recomputation / (efficiency x peak), 6 P bytes / bandwidth), two numbers

The toys know the calibration rows of the machine; where it has none, those of all machines with that GPU, or of all.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.forecast.job import Job
from shardlab.forecast.predict import forecast_of, may_retry, waits_for_host
from shardlab.installed import data_path

TOYS = ("constant_rate_error", "roofline_error")
Floats = NDArray[np.float64]
Pair = tuple[dict[str, Any], float]
FLAGS = ("gated", "compiled", "no_sync", "sequence_parallel", "async_tensor")
ARGUMENTS = tuple(Job.__dataclass_fields__)


@dataclass(frozen=True)
class PublishedStep:
    """A step that was measured.

    Attributes:
        machine: a laboratory and its GPUs.
        name: of the model, with rows, tokens and ranks.
        source: where it was published.
        job: what ran.
        seconds: that it took.
        calibrates: whether the forecasts of its machine know it.
        held_out: whether it came when the formulas stood.
        peak_bytes: allocated at the peak; NaN where that is not known.
    """

    machine: str
    name: str
    source: str
    job: Job
    seconds: float
    calibrates: bool
    held_out: bool
    peak_bytes: float

    @property
    def laboratory(self) -> str:
        """Whose it is: machines of one laboratory run the same code."""
        return self.machine.partition(" ")[0]

    @property
    def title(self) -> str:
        """The step, and whose it is."""
        return f"{self.name} of {self.machine}"


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """All of them, in the order of the file."""
    with data_path("published_steps.csv").open(newline="") as file:
        return tuple(map(_step_of, csv.DictReader(file)))


def _step_of(row: Mapping[str, str]) -> PublishedStep:
    given = {name: int(row[name]) if row[name].isdigit() else row[name] for name in ARGUMENTS if row.get(name)}
    flags = {name: row[name] == "1" for name in FLAGS if row[name]}
    return PublishedStep(
        row["machine"], row["name"], row["source"], Job(**given | flags),  # type: ignore[arg-type]
        float(row["measured_seconds"]), row["calibration"] == "1", row["held_out"] == "1",
        float(row["allocated_gib"]) * 2**30 if row["allocated_gib"] else nan,
    )  # fmt: skip


@cache
def calibration_of(machine: str) -> tuple[Pair, ...]:
    """What the forecasts of a machine know of it."""
    steps = (step for step in published_steps() if step.machine == machine and step.calibrates)
    return tuple((asdict(step.job), step.seconds) for step in steps)


@cache
def error_of(step: PublishedStep, *, is_calibrated: bool) -> float:
    """By which share of its seconds the forecast of a step misses, with what is known of its machine or without."""
    return forecast_of(step.job, calibration_of(step.machine) if is_calibrated else ()).seconds / step.seconds - 1


def validate_published() -> pd.DataFrame:
    """Each published row with its forecast and the errors of it and of both toys, a share of the measured seconds.

    Returns:
        ``laboratory``, ``machine``, ``name``, ``source``, ``hardware``, ``tp``, ``calibration`` (whether the row was
        given to the forecasts of its machine), ``held_out``, ``measured_seconds``, ``predicted_seconds``,
        ``least_seconds`` and ``most_seconds`` (with what the forecast warns of), ``error``, ``constant_rate_error``,
        ``roofline_error``, ``raw_error`` (without a calibration), ``peak_error`` (of bytes allocated at the peak; NaN
        where they are not known), ``warned`` (whether the forecast warns of the allocator), ``host_bound`` (whether the
        device waits for its host).
    """
    found = []
    for step in published_steps():
        calibrating = [other for other in published_steps() if other.calibrates]
        same = [other for other in calibrating if other.job.hardware == step.job.hardware]
        known = [(other.job, other.seconds) for other in same or calibrating]
        of_machine = calibration_of(step.machine)
        forecast = forecast_of(step.job, of_machine)
        toys = _toys(step.job, [(Job(**given), seconds) for given, seconds in of_machine] or known)
        misses = (seconds / step.seconds - 1 for seconds in (forecast.seconds, *toys))
        found.append({
            "laboratory": step.laboratory, "machine": step.machine, "name": step.name, "source": step.source,
            "hardware": step.job.hardware, "tp": step.job.tensor, "calibration": step.calibrates,
            "held_out": step.held_out, "measured_seconds": step.seconds,
            "predicted_seconds": forecast.seconds, "least_seconds": forecast.least_seconds,
            "most_seconds": forecast.most_seconds, **dict(zip(("error", *TOYS), misses, strict=True)),
            "raw_error": error_of(step, is_calibrated=False), "peak_error": forecast.peak_bytes / step.peak_bytes - 1,
            "warned": may_retry(step.job), "host_bound": waits_for_host(forecast.parts),
        })  # fmt: skip
    return pd.DataFrame(found)


def summary(validated: pd.DataFrame) -> pd.DataFrame:
    """Median, 90th percentile and worst of the absolute errors on the rows that calibrate nothing."""
    errors = validated.loc[~validated["calibration"], ["error", *TOYS]].abs()
    return pd.DataFrame({"median": errors.median(), "p90": errors.quantile(0.9), "worst": errors.max()})


def _toys(job: Job, calibration: Sequence[tuple[Job, float]]) -> tuple[float, float]:
    model, work, sent = _work(job)
    models, works, moved = np.array([_work(known) for known, _ in calibration]).T
    seconds = np.array([measured for _, measured in calibration])
    rate, bandwidth = fit_roofline(works, moved, seconds)
    return model / fit_constant(models, seconds), max(work / rate, sent / bandwidth)


def _work(job: Job) -> tuple[float, float, float]:
    """Seconds of a GPU at its peak, without and with what is recomputed, and bytes: two gathers and a reduction."""
    sent = 6 * job.num_params * job.accumulation / job.tensor if job.data > 1 else 0.0
    return job.seconds_at_peak, job.seconds_at_peak * (1 + job.recomputed / job.layers / 3), sent


def fit_constant(work: Floats, seconds: Floats) -> float:
    """The rate of a toy that knows work alone: the median one."""
    return float(np.exp(np.median(np.log(work / seconds))))


def fit_roofline(work: Floats, sent: Floats, seconds: Floats) -> tuple[float, float]:
    """Rate and bandwidth that bring max(work / rate, sent / bandwidth) nearest to the seconds.

    One step says the rate alone.
    """
    rates = np.geomspace((work / seconds).min() / 2, 10 * (work / seconds).max(), 300)[:, None]
    bandwidths = np.geomspace(1e6, 1e13, 300) if len(work) > 1 else np.array([np.inf])
    misses = sum(
        np.abs(np.log(np.maximum(one / rates, moved / bandwidths) / measured))
        for one, moved, measured in zip(work, sent, seconds, strict=True)
    )
    best = np.unravel_index(np.argmin(misses), np.shape(misses))
    return float(rates[best[0], 0]), float(bandwidths[best[1]])
