"""Two runs side by side: every number of their summaries, and how far their losses differ."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

QUANTITIES = (
    "step_ms",
    "exposed_comm_ms",
    "overlap",
    "peak_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "offloaded_bytes",
    "other_bytes",
    "unattributed_bytes",
    "padding_bytes",
    "wire_bytes_per_step",
    "moved_bytes_per_step",
    "recorder_share",
    "loss_first",
    "loss_last",
)
Pair = tuple[str, str]


def pairs_of(first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    """The strategies to compare: those with the same name, or the only one of a run with each of the other.

    Raises:
        ValueError: they have no strategy in common.
    """
    common = [(name, name) for name in first if name in second]
    if not common and 1 in (len(first), len(second)):
        return [(name, against) for name in first for against in second]
    if not common:
        raise ValueError(f"runs: {', '.join(first)} and {', '.join(second)} have no strategy in common")
    return common


def differences(first: pd.DataFrame, second: pd.DataFrame, pairs: Sequence[Pair]) -> pd.DataFrame:
    """Every number of two summaries.

    Args:
        first: rows of ``summary.json``.
        second: likewise.
        pairs: see ``pairs_of``.

    Returns:
        One row per pair and quantity: ``strategy`` (both names where they differ), ``quantity``, ``first``, ``second``,
        ``difference`` (second - first) and ``ratio`` (second / first); NaN if a summary has no number.
    """
    one, other = first.set_index("strategy"), second.set_index("strategy")
    rows = []
    for name, against in pairs:
        for quantity in (name for name in QUANTITIES if name in one.columns and name in other.columns):
            values = (_number(one.at[name, quantity]), _number(other.at[against, quantity]))
            ratio = values[1] / values[0] if values[0] else np.nan
            strategy = name if name == against else f"{name} / {against}"
            rows.append((strategy, quantity, *values, values[1] - values[0], ratio))
    return pd.DataFrame(rows, columns=["strategy", "quantity", "first", "second", "difference", "ratio"])


def loss_differences(first: pd.DataFrame, second: pd.DataFrame, pairs: Sequence[Pair]) -> pd.DataFrame:
    """How far the losses of two runs differ at each step.

    Args:
        first: table ``steps``.
        second: likewise.
        pairs: see ``pairs_of``.

    Returns:
        One row per pair and step that both have: ``first_run``, ``second_run``, ``step``, ``first``, ``second`` and
        ``difference``, absolute; inf or NaN if a loss is.
    """
    parts = []
    for name, against in pairs:
        one, other = (_losses(steps, run) for steps, run in ((first, name), (second, against)))
        both = pd.concat({"first": one, "second": other}, axis=1, join="inner").reset_index()
        both.insert(0, "second_run", against)
        both.insert(0, "first_run", name)
        parts.append(both.assign(difference=(both["second"] - both["first"]).abs()))
    return pd.concat(parts, ignore_index=True)


def _losses(steps: pd.DataFrame, run: str) -> "pd.Series[float]":
    """The loss of each step, which is the same on all ranks."""
    losses: pd.Series[float] = steps[steps["run"] == run].groupby("step")["loss"].first()
    return losses


def _number(value: object) -> float:
    return float("nan") if value is None or pd.isna(value) else float(value)  # type: ignore[call-overload, arg-type]
