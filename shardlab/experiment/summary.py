"""One row per strategy: what it cost, beside the proof that it trained the same model; and how a person reads it."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.memory import at_rest
from shardlab.trace.store import Records
from shardlab.vocabulary import Role

REFERENCE = "single"
# Sums in another order differ in the last bits, and training carries the difference along.
LOSS_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
# Later than this, training has amplified a last bit of float32 to anything: two right runs drift apart.
JUDGED_STEPS = 10
ROUNDED_LOSS_TOLERANCE = 0.05  # 16-bit compute: another rounding, not another algorithm
MB = 1e6
COLUMNS = {
    "strategy": ("strategy", 1),
    "ranks": ("ranks", 1),
    "loss_last": ("last loss", 1),
    "max_loss_difference": ("loss differs", 1),
    "step_ms": ("step (ms)", 1),
    "exposed_comm_ms": ("exposed (ms)", 1),
    "overlap": ("hidden (%)", 0.01),
    "parameter_bytes": ("parameters (MB)", MB),
    "gradient_bytes": ("gradients (MB)", MB),
    "optimizer_bytes": ("optimizer (MB)", MB),
    "offloaded_bytes": ("offloaded (MB)", MB),
    "peak_bytes": ("peak (MB)", MB),
    "wire_bytes_per_step": ("sent (MB/step)", MB),
}
PLANNED = {
    "strategy": ("strategy", 1),
    "planned_rest_bytes": ("planned at rest (bytes)", 1),
    "rest_bytes": ("measured (bytes)", 1),
    "planned_wire_bytes": ("planned to send (bytes)", 1),
    "wire_bytes_per_step": ("sent (bytes)", 1),
    "as_planned": ("each role, rank and message as planned", 1),
}
# The same for a terminal of 80 columns: a word over its unit.
TERMINAL = {
    "strategy": ("strategy", 1),
    "loss_last": ("last\nloss", 1),
    "max_loss_difference": ("loss\ndiffers", 1),
    "step_ms": ("step\nms", 1),
    "exposed_comm_ms": ("exposed\nms", 1),
    "overlap": ("hidden\n%", 0.01),
    "parameter_bytes": ("params\nMB", MB),
    "gradient_bytes": ("grads\nMB", MB),
    "optimizer_bytes": ("optim\nMB", MB),
    "offloaded_bytes": ("host\nMB", MB),
    "peak_bytes": ("peak\nMB", MB),
    "wire_bytes_per_step": ("sent\nMB/step", MB),
}


def summarise(records: Records, dtype: str) -> list[dict[str, Any]]:
    """The rows of ``summary.json``.

    Times are medians over steps and ranks; the first step and memory-traced ones are left out where others remain.
    Bytes are the maximum over ranks, at rest after the last step in which they were read; ``peak_bytes`` is the highest
    moment of the traced steps. ``wire_bytes_per_step`` is what the rank that sends most sends in the last step, without
    the loss for the report. ``recorder_share`` is the time recording took over the time of the steps, on the rank where
    it is largest. ``max_loss_difference`` is against ``loss_reference``, null without one; ``losses_equal`` judges the
    first ``JUDGED_STEPS`` steps, for which ``judged_loss_difference`` is the largest. Where a loss of the run or of its
    reference is inf or NaN at any step, the differences are null and ``losses_equal`` is False, also without a
    reference. No number here is inf or NaN, which JSON does not have.
    """
    losses = {str(run): own.groupby("step")["loss"].first() for run, own in records.steps.groupby("run", sort=False)}
    rest = at_rest(records.memory).pivot_table(index="run", columns="role", values="bytes", aggfunc="max")
    return [
        {
            **_training(run, losses, records, dtype),
            **_times(records.steps[records.steps["run"] == run]),
            **_bytes(run, rest, records),
        }
        for run in losses
    ]


def reference_of(runs: Iterable[str]) -> str | None:
    """The run whose losses the others' are compared with: 'single', else the first of several."""
    names = list(runs)
    if REFERENCE in names:
        return REFERENCE
    return names[0] if len(names) > 1 else None


def not_finite(steps: pd.DataFrame) -> dict[str, int]:
    """The first step at which the loss was inf or NaN, of each run in which that happened.

    Args:
        steps: table ``steps``.
    """
    wrong = steps[~np.isfinite(steps["loss"].astype("float64"))]
    return {str(run): int(step) for run, step in wrong.groupby("run", sort=False)["step"].min().items()}


def timed_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps whose times count: of each run those after the first, not slowed by tracing; all where none is left."""
    counts = ~steps["traced_memory"] & (steps["step"] > 0)
    return steps[counts | ~counts.groupby(steps["run"]).transform("any")]


def readable_summary(summary: pd.DataFrame, columns: Mapping[str, tuple[str, float]] = COLUMNS) -> pd.DataFrame:
    """The summary with units a person reads: ms, percent, MB (decimal).

    Args:
        summary: rows of ``summary.json``.
        columns: header and divisor of each column to show; what nobody offloads is not shown.
    """
    return pd.DataFrame(
        {
            label: summary[name] if divisor == 1 else summary[name].astype("Float64") / divisor
            for name, (label, divisor) in columns.items()
            if name != "offloaded_bytes" or summary[name].any()
        }
    )


def _training(run: str, losses: dict[str, pd.Series], records: Records, dtype: str) -> dict[str, Any]:
    own, reference = losses[run], reference_of(losses)
    apart = None if reference is None else (own - losses[reference]).abs()
    difference = None if apart is None else float(apart[apart.index < JUDGED_STEPS].max())
    rounds = any(_rounds(name, records) for name in (run, reference) if name is not None)
    tolerance = ROUNDED_LOSS_TOLERANCE if rounds else LOSS_TOLERANCE[dtype]
    failed = not not_finite(records.steps).keys().isdisjoint({run, reference})
    equal = None if difference is None else difference <= tolerance
    return {
        "strategy": run,
        "ranks": int(records.manifests[run]["ranks"]),
        "steps": len(own),
        "loss_first": _number(own.iloc[0]),
        "loss_last": _number(own.iloc[-1]),
        "loss_reference": reference,
        "max_loss_difference": None if failed or apart is None else float(apart.max()),
        "judged_loss_difference": None if failed else difference,
        "losses_equal": False if failed else equal,
    }


def _rounds(run: str, records: Records) -> bool:
    return bool(records.manifests[run]["config"].get("precision", "full") != "full")


def _times(steps: pd.DataFrame) -> dict[str, Any]:
    timed = timed_steps(steps)
    return {
        "step_ms": float(timed["step_us"].median()) / 1e3,
        "exposed_comm_ms": _number(timed["exposed_comm_us"].median(), 1e-3),
        "overlap": _number(timed["overlap"].median()),
        "source": str(steps["source"].iloc[0]),
    }


def _bytes(run: str, rest: pd.DataFrame, records: Records) -> dict[str, Any]:
    steps = records.steps[records.steps["run"] == run]
    last = steps[steps["step"] == steps["step"].max()]
    held = {str(role): int(num_bytes) for role, num_bytes in rest.loc[run].to_dict().items()}
    return {
        "peak_bytes": None if pd.isna(peak := steps["peak_bytes"].max()) else int(peak),
        "parameter_bytes": held.get(Role.PARAMETER, 0),
        "gradient_bytes": held.get(Role.GRADIENT, 0),
        "optimizer_bytes": held.get(Role.OPTIMIZER_STATE, 0) + held.get(Role.MASTER_WEIGHT, 0),
        "offloaded_bytes": held.get(Role.OFFLOADED, 0),
        "other_bytes": held.get(Role.OTHER, 0),
        "padding_bytes": int(records.manifests[run]["padding_bytes"]),
        "wire_bytes_per_step": float(last["wire_bytes"].max()),
        "recorder_share": _number(records.manifests[run]["recorder_share"]),
    }


def _number(value: Any, factor: float = 1.0) -> float | None:
    """A float, or None where there is no number (without communication there is no overlap) or none that JSON has."""
    return None if pd.isna(value) or not isfinite(value) else float(value) * factor
