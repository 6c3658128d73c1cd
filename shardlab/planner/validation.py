"""Forecasts against published step times, and beside them two toys that a forecast has to beat.

    constant MFU    seconds = FLOPs of the model / (MFU x peak), one number from the calibration rows
    roofline        seconds = max(FLOPs with recomputation / (efficiency x peak), 6 P bytes / bandwidth), two numbers

The rows are those of ``data/published_steps.csv``, each with its source and with what had to be assumed. Which rows
calibrate follows a rule: the first of every machine with more than two, and of the ZeRO-3 machine the last too, since
its links are part of the question. A machine with fewer rows has none: its forecast stands on the presets, and the toys
take the calibration rows of all machines with that GPU.

These rows were in sight while the terms of the forecast were written; what was chosen on them is said in ``hardware``
and ``transformer``. So the errors are those of a fit with few free numbers, not of rows that nobody had seen.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from shardlab.installed import data_path
from shardlab.planner.forecast import predict_step
from shardlab.planner.step_model import Job, num_params

ARGUMENTS = tuple(name for name in Job.__dataclass_fields__ if name != "gated")
TOYS = ("constant_mfu_error", "roofline_error")
Pair = tuple[dict[str, Any], float]


def published_pairs() -> pd.DataFrame:
    """The published rows: ``machine``, ``name``, ``calibration``, ``source``, and ``pair``, arguments and seconds."""
    rows = pd.read_csv(data_path("published_steps.csv"), dtype=str, keep_default_na=False)
    pairs = [(_arguments(row), float(row["measured_seconds"])) for row in rows.to_dict("records")]
    found = rows[["machine", "name", "source"]].assign(calibration=rows["calibration"] == "1")
    return found.assign(pair=pd.Series(pairs, dtype=object))


def _arguments(row: Mapping[Hashable, Any]) -> dict[str, Any]:
    """What a row gives to ``predict_step``; empty cells are left out."""
    given = {name: row[name] for name in ARGUMENTS if row[name]}
    found: dict[str, Any] = {name: int(text) if text.isdigit() else text for name, text in given.items()}
    return {**found, "compiled": "compiled" in given}


def nearest(job: Job) -> tuple[str, float] | None:
    """The published step that is most like a job, of its GPU and strategy, and by which share its forecast misses.

    None where no such step is known. Alike are steps of as many parameters, tokens a rank and ranks.
    """
    rows = published_pairs()
    found: list[tuple[float, str, float]] = []
    for row in rows.to_dict("records"):
        arguments, measured = row["pair"]
        other = Job(**arguments)
        if (other.card.name, other.strategy) == (job.card.name, job.strategy):
            calibration = list(rows[rows["calibration"] & (rows["machine"] == row["machine"])]["pair"])
            error = predict_step(**arguments, calibration=calibration).seconds / measured - 1
            found.append((_apart(job, other), f"{row['name']} of {row['machine']}", error))
    return min(found)[1:] if found else None


def _apart(one: Job, other: Job) -> float:
    pairs = (
        (num_params(one.shape) * one.tensor, num_params(other.shape) * other.tensor), (one.data, other.data),
        (one.shape.tokens * one.accumulation, other.shape.tokens * other.accumulation),
    )  # fmt: skip
    return sum(abs(float(np.log(left / right))) for left, right in pairs)


def validate_published() -> pd.DataFrame:
    """Each published row with its forecast and the errors of it and of both toys, a share of the measured seconds.

    Returns:
        ``machine``, ``name``, ``calibration`` (whether the row was given to the forecasts of its machine),
        ``measured_seconds``, ``predicted_seconds``, ``error``, ``constant_mfu_error``, ``roofline_error``, ``source``.
    """
    rows = published_pairs()
    found = []
    for row in rows.to_dict("records"):
        arguments, measured = row["pair"]
        calibration = list(rows[rows["calibration"] & (rows["machine"] == row["machine"])]["pair"])
        alike = [pair for pair in rows[rows["calibration"]]["pair"] if pair[0]["hardware"] == arguments["hardware"]]
        predicted = predict_step(**arguments, calibration=calibration).seconds
        toys = (_constant_mfu(arguments, calibration or alike), _roofline(arguments, calibration or alike))
        errors = [seconds / measured - 1 for seconds in (predicted, *toys)]
        found.append([row["machine"], row["name"], row["calibration"], measured, predicted, *errors, row["source"]])
    names = ["machine", "name", "calibration", "measured_seconds", "predicted_seconds", "error", *TOYS, "source"]
    return pd.DataFrame(found, columns=names)


def summary(validated: pd.DataFrame) -> pd.DataFrame:
    """Median, 90th percentile and worst of the absolute errors on the rows that calibrate nothing."""
    errors = validated.loc[~validated["calibration"], ["error", *TOYS]].abs()
    return pd.DataFrame({"median": errors.median(), "p90": errors.quantile(0.9), "worst": errors.max()})


def _flops(arguments: Mapping[str, Any], *, recomputed: bool) -> float:
    """Seconds of a GPU at its peak: 6 FLOPs a parameter and token, 12 h s L a token of attention."""
    job = Job(**arguments)
    shape = job.shape
    token = 6 * num_params(shape) + 12 * job.hidden * job.seq_len * job.layers
    again = 1 + job.recomputed / job.layers / 3 if recomputed else 1
    return again * token * shape.tokens * job.accumulation / job.tensor / job.card.peaks[job.precision]


def _constant_mfu(arguments: Mapping[str, Any], calibration: Sequence[Pair]) -> float:
    mfu = np.mean([_flops(known, recomputed=False) / seconds for known, seconds in calibration])
    return float(_flops(arguments, recomputed=False) / mfu)


def _roofline(arguments: Mapping[str, Any], calibration: Sequence[Pair]) -> float:
    """With the efficiency and the bandwidth that meet the calibration best; one pair says the efficiency alone."""
    efficiencies = np.geomspace(0.05, 1, 300)
    bandwidths = np.geomspace(1e9, 1e13, 300) if len(calibration) > 1 else np.array([np.inf])
    misses = sum(
        np.log(np.maximum.outer(_flops(known, recomputed=True) / efficiencies, _sent(known) / bandwidths) / seconds)
        ** 2
        for known, seconds in calibration
    )
    best = np.unravel_index(np.argmin(misses), (len(efficiencies), len(bandwidths)))
    compute = _flops(arguments, recomputed=True) / efficiencies[best[0]]
    return float(max(compute, _sent(arguments) / bandwidths[best[1]]))


def _sent(arguments: Mapping[str, Any]) -> float:
    """Two gathers and a reduction of everything, in 16 bits."""
    job = Job(**arguments)
    return 6 * num_params(job.shape) * job.accumulation / job.tensor if job.data > 1 else 0.0
