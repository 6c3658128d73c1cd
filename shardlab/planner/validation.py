"""Forecasts against published step times, and beside them two toys that a forecast has to beat.

    constant rate    seconds = FLOPs of the model / (MFU x peak), one number from the calibration rows
    roofline         seconds = max(FLOPs with recomputation / (efficiency x peak), 6 P bytes / bandwidth), two numbers

The rows are those of ``data/published_steps.csv``, each with its source and with what had to be assumed. Which rows
calibrate follows a rule: the first of every machine with more than two, and of the ZeRO-3 machine the last too, since
its links are part of the question. A machine with fewer rows has none: its forecast stands on the presets, and the toys
take the calibration rows of all machines with that GPU.

Most rows were in sight while the terms of the forecast were written; what was chosen on them is said in ``hardware``
and ``transformer``. So their errors are those of a fit with few free numbers. Rows that are held out came when the
formulas stood, and nothing is chosen on them; the odd ones among them are kept.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.installed import data_path
from shardlab.planner.forecast import predict_step
from shardlab.planner.job import Job

ARGUMENTS = tuple(name for name in Job.__dataclass_fields__ if name != "gated")
FLAGS = ("calibration", "held_out")
TOYS = ("constant_rate_error", "roofline_error")
Pair = tuple[dict[str, Any], float]
Floats = NDArray[np.float64]


def published_pairs() -> pd.DataFrame:
    """The published rows: ``machine``, ``name``, ``source``, ``hardware``, ``calibration``, ``held_out``,
    ``peak_bytes``, ``pair``.

    A pair is arguments and seconds; bytes allocated at the peak are known of a few rows only.
    """
    rows = pd.read_csv(data_path("published_steps.csv"), dtype=str, keep_default_na=False)
    pairs = [(_arguments(row), float(row["measured_seconds"])) for row in rows.to_dict("records")]
    found = rows[["machine", "name", "source", "hardware", *FLAGS]].assign(
        **{name: rows[name] == "1" for name in FLAGS}
    )
    peaks = pd.to_numeric(rows["allocated_gib"]) * 2**30
    return found.assign(peak_bytes=peaks, pair=pd.Series(pairs, dtype=object))


def _arguments(row: Mapping[Hashable, Any]) -> dict[str, Any]:
    """What a row gives to ``predict_step``; empty cells are left out."""
    given = {name: row[name] for name in ARGUMENTS if row.get(name)}
    found: dict[str, Any] = {name: int(text) if text.isdigit() else text for name, text in given.items()}
    return {**found, "compiled": "compiled" in given}


def nearest(job: Job, validated: pd.DataFrame) -> tuple[str, float] | None:
    """The published step that is most like a job, of its GPU and strategy, and by which share its forecast misses.

    None where no such step is known. Alike are steps of as many parameters, ranks and tokens of a rank's micro-batch.
    """
    found: list[tuple[float, str, float]] = []
    for (arguments, _), row in zip(published_pairs()["pair"], validated.to_dict("records"), strict=True):
        other = Job(**arguments)
        if (other.card.name, other.strategy) == (job.card.name, job.strategy):
            found.append((_apart(job, other), f"{row['name']} of {row['machine']}", row["error"]))
    return min(found)[1:] if found else None


def _apart(one: Job, other: Job) -> float:
    pairs = (
        (one.num_params * one.tensor, other.num_params * other.tensor), (one.data, other.data),
        (one.tokens, other.tokens),
    )  # fmt: skip
    return sum(abs(float(np.log(left / right))) for left, right in pairs)


def validate_published() -> pd.DataFrame:
    """Each published row with its forecast and the errors of it and of both toys, a share of the measured seconds.

    Returns:
        ``machine``, ``name``, ``source``, ``hardware``, ``calibration`` (whether the row was given to the forecasts of
        its machine), ``held_out``, ``measured_seconds``, ``predicted_seconds``, ``error``, ``constant_rate_error``,
        ``roofline_error``, ``peak_error`` (of bytes allocated at the peak; NaN where they are not known).
    """
    rows = published_pairs()
    found = []
    for row in rows.to_dict("records"):
        arguments, measured = row["pair"]
        calibration = list(rows[rows["calibration"] & (rows["machine"] == row["machine"])]["pair"])
        alike = [pair for pair in rows[rows["calibration"]]["pair"] if pair[0]["hardware"] == arguments["hardware"]]
        forecast = predict_step(**arguments, calibration=calibration)
        seconds = [forecast.seconds, *_toys(arguments, calibration or alike)]
        misses = [one / measured - 1 for one in seconds]
        found.append([measured, forecast.seconds, *misses, forecast.peak_bytes / row["peak_bytes"] - 1])
    names = ["measured_seconds", "predicted_seconds", "error", *TOYS, "peak_error"]
    return rows.drop(columns=["pair", "peak_bytes"]).join(pd.DataFrame(found, columns=names))


def summary(validated: pd.DataFrame) -> pd.DataFrame:
    """Median, 90th percentile and worst of the absolute errors on the rows that calibrate nothing."""
    errors = validated.loc[~validated["calibration"], ["error", *TOYS]].abs()
    return pd.DataFrame({"median": errors.median(), "p90": errors.quantile(0.9), "worst": errors.max()})


def _toys(arguments: Mapping[str, Any], calibration: Sequence[Pair]) -> tuple[float, float]:
    model, work, sent = _work(arguments)
    models, works, moved = np.array([_work(known) for known, _ in calibration]).T
    seconds = np.array([measured for _, measured in calibration])
    rate, bandwidth = fit_roofline(works, moved, seconds)
    return model / fit_constant(models, seconds), max(work / rate, sent / bandwidth)


def _work(arguments: Mapping[str, Any]) -> tuple[float, float, float]:
    """Seconds of a GPU at its peak, without and with what is recomputed, and bytes: two gathers and a reduction."""
    job = Job(**arguments)
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
