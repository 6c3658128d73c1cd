"""Steps that others have published, ``data/published_steps.csv``, and by how much their forecasts miss.

Each has its source and what had to be assumed. Which of them calibrate follows a rule: the first of every machine with
more than two, and of the ZeRO-3 machine the last too, since its links are part of the question. A machine with fewer
has none, and its forecasts stand on the presets.

Those that are not held out were in sight while the terms of the forecast were written; what was chosen on them is said
in ``hardware`` and ``transformer``. So their errors are those of a fit with few free numbers. Steps that are held out
came when the formulas stood, and no second of a forecast was chosen on them; the odd ones among them are kept.
"""

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import nan
from typing import Any

from shardlab.installed import data_path
from shardlab.planner.forecast import forecast_of
from shardlab.planner.job import Job

Pair = tuple[dict[str, Any], float]
ARGUMENTS = tuple(name for name in Job.__dataclass_fields__ if name != "gated")


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
    return PublishedStep(
        row["machine"], row["name"], row["source"], Job(**given | {"compiled": "compiled" in given}),  # type: ignore[arg-type]
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
