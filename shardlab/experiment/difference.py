"""Two saved comparisons side by side: every number of their summaries, how far their losses differ, and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import pandas as pd

from shardlab.experiment.comparison import Comparison
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.same_data import others_than
from shardlab.experiment.summary import COLUMNS, judged, not_finite, tolerance_of_run

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
Saved = tuple[Comparison, CompareConfig]
WITHOUT_EFFECT = {"strategies", "timeout_s"}  # fields that change no number of a strategy
NAMES = {"loss_first": "first loss", "other_bytes": "other (kB)", "unattributed_bytes": "unattributed (kB)",
         "padding_bytes": "padding (kB)", "recorder_share": "recording (%)"}  # fmt: skip
DIVISORS = {
    "loss_first": 1, "other_bytes": 1e3, "unattributed_bytes": 1e3, "padding_bytes": 1e3, "recorder_share": 0.01,
}  # fmt: skip


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``differences`` in readable units, without quantities that neither run has."""
    rows = table[table[["first", "second"]].fillna(0).any(axis=1)]
    labels = {name: label for name, (label, _) in COLUMNS.items()} | NAMES
    divisor = rows["quantity"].map({name: size for name, (_, size) in COLUMNS.items()} | DIVISORS).astype("float64")
    shown = {name: rows[name] / divisor for name in ("first", "second", "difference")}
    return rows.assign(quantity=rows["quantity"].map(labels), **shown)


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


@dataclass(frozen=True)
class Difference:
    """The differences between two comparisons, from the first to the second.

    Raises:
        ValueError: on first use, if they have no strategy in common.
    """

    first: Saved
    second: Saved

    @cached_property
    def pairs(self) -> list[Pair]:
        """The strategies that are compared."""
        one, other = (list(saved[0].summary["strategy"]) for saved in (self.first, self.second))
        return pairs_of(one, other)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Every number of every strategy; see ``differences``."""
        return differences(self.first[0].summary, self.second[0].summary, self.pairs)

    @property
    def readable(self) -> pd.DataFrame:
        """The same in readable units, without quantities that neither run has."""
        return readable(self.table)

    @property
    def losses(self) -> pd.DataFrame:
        """The losses of every step that both have, and their difference."""
        return loss_differences(self.first[0].records.steps, self.second[0].records.steps, self.pairs)

    @property
    def losses_equal(self) -> bool:
        """Whether the first common steps of each pair agree; False if it has none, or a loss is inf or NaN."""
        agree = all(len(found := self._judged(pair)) and found.max() <= self.tolerance(pair) for pair in self.pairs)
        return agree and not any(self._not_finite(pair) for pair in self.pairs)

    def tolerance(self, pair: Pair) -> float:
        """How far equal losses of a pair may differ: the tolerance of the run that computes in the coarser numbers."""
        runs = zip((self.first, self.second), pair, strict=True)
        return max(tolerance_of_run(run, saved.records, config.dtype) for (saved, config), run in runs)

    @property
    def settings(self) -> list[str]:
        """One line for strategies that only one has, and for each field of the configuration that differs."""
        one, other = self.first[1], self.second[1]
        paired = {name for pair in self.pairs for name in pair}
        alone = [
            f"strategies: {', '.join(names)} only in the {which}, so not compared"
            for which, saved in (("first", self.first), ("second", self.second))
            if (names := [name for name in saved[0].summary["strategy"] if name not in paired])
        ]
        return alone + [
            f"{field.name}: {getattr(one, field.name)} in the first, {getattr(other, field.name)} in the second"
            for field in fields(CompareConfig)
            if field.name not in WITHOUT_EFFECT and getattr(one, field.name) != getattr(other, field.name)
        ]

    @property
    def verdicts(self) -> list[str]:
        """One sentence on the losses of each pair."""
        return [self._verdict(pair) for pair in self.pairs]

    def _verdict(self, pair: Pair) -> str:
        name = pair[0] if pair[0] == pair[1] else f"{pair[0]} and {pair[1]}"
        found = self._judged(pair)
        if not len(found):
            return f"Losses of {name} cannot be compared: no step is in both."
        if wrong := self._not_finite(pair):
            return f"Losses of {name} are NOT equal: {' and '.join(wrong)}."
        largest = float(found.max())
        equal = "equal" if largest <= self.tolerance(pair) else "NOT equal"
        said = f"Losses of {name} are {equal}: in {len(found)} steps they differ by at most {largest:.1e}."
        return said if equal == "equal" else said + self._other_data(pair)

    def _other_data(self, pair: Pair) -> str:
        """A sentence if the two runs of a pair trained on other rows; else empty."""
        saved = zip(("first", "second"), pair, (self.first, self.second), strict=True)
        others = others_than("first", {which: saved[0].records.manifests[run] for which, run, saved in saved})
        return f" Their data differ from step {others['second']} on." if others else ""

    def _judged(self, pair: Pair) -> "pd.Series[float]":
        """By step, how far the losses of a pair differ, in the steps that are judged."""
        losses = self.losses
        own = losses[(losses["first_run"] == pair[0]) & (losses["second_run"] == pair[1])]
        return judged(own.set_index("step")["difference"])

    def _not_finite(self, pair: Pair) -> list[str]:
        """From which step on a loss of the pair is inf or NaN."""
        found = (not_finite(saved[0].records.steps) for saved in (self.first, self.second))
        return [
            f"that of the {which} run is not finite from step {steps[run]} on"
            for which, run, steps in zip(("first", "second"), pair, found, strict=True)
            if run in steps
        ]
