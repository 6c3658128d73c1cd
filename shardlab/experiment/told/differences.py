"""Two comparisons side by side: every number of each strategy, what was set otherwise, and whether losses agree."""

from collections.abc import Sequence
from dataclasses import fields
from math import nan

import pandas as pd

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.told.losses import others_than
from shardlab.experiment.told.saved_runs import Comparison
from shardlab.experiment.told.summary import COLUMNS, MB, MOVED, judged, losses_of, not_finite, tolerance_of_run

Saved = tuple[Comparison, CompareConfig]
Pair = tuple[str, str]
WITHOUT_EFFECT = {"strategies", "timeout_s"}  # fields that change no number of a strategy
QUANTITIES = (
    "step_ms", "exposed_comm_ms", "overlap", "peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
    "offloaded_bytes", "buffer_bytes", "other_bytes", "unattributed_bytes", "padding_bytes",
    "wire_bytes_per_step", MOVED, "recorder_share", "unwatched_recorder_share", "loss_first", "loss_last",
)  # fmt: skip
# Header and divisor of each; a summary shows the first ones too.
HEADERS = COLUMNS | {
    "loss_first": ("first loss", 1), "buffer_bytes": ("buckets (MB)", MB), "other_bytes": ("other (kB)", 1e3),
    "unattributed_bytes": ("unattributed (kB)", 1e3), "padding_bytes": ("padding (kB)", 1e3),
    "recorder_share": ("recording (%)", 0.01), "unwatched_recorder_share": ("unwatched (%)", 0.01),
}  # fmt: skip


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


def differences(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Every number of two summaries.

    Args:
        first: rows of ``summary.json``.
        second: likewise.

    Returns:
        One row per pair and quantity: ``strategy`` (both names where they differ), ``quantity``, ``first``, ``second``,
        ``difference`` (second - first) and ``ratio`` (second / first); NaN if a summary has no number.

    Raises:
        ValueError: see ``pairs_of``.
    """
    one, other = first.set_index("strategy"), second.set_index("strategy")
    rows = []
    for name, against in pairs_of(list(one.index), list(other.index)):
        for quantity in (name for name in QUANTITIES if name in one.columns and name in other.columns):
            values = pd.to_numeric(pd.Series([one.at[name, quantity], other.at[against, quantity]])).astype(float)
            ratio = values[1] / values[0] if values[0] else nan
            strategy = name if name == against else f"{name} / {against}"
            rows.append((strategy, quantity, *values, values[1] - values[0], ratio))
    return pd.DataFrame(rows, columns=["strategy", "quantity", "first", "second", "difference", "ratio"])


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``differences`` in readable units, without quantities that neither run has."""
    rows = table[table[["first", "second"]].fillna(0).any(axis=1)]
    divisor = rows["quantity"].map({name: divisor for name, (_, divisor) in HEADERS.items()}).astype("float64")
    shown = {name: rows[name] / divisor for name in ("first", "second", "difference")}
    return rows.assign(quantity=rows["quantity"].map({name: header for name, (header, _) in HEADERS.items()}), **shown)


def set_otherwise(first: Saved, second: Saved) -> list[str]:
    """One line for strategies that only one has, and for each field of the configuration that differs."""
    names = [list(comparison.summary["strategy"]) for comparison, _ in (first, second)]
    paired = {name for pair in pairs_of(*names) for name in pair}
    alone = [
        f"strategies: {', '.join(others)} only in the {which}, so not compared"
        for which, known in zip(("first", "second"), names, strict=True)
        if (others := [name for name in known if name not in paired])
    ]
    values = (
        (field.name, *(getattr(config, field.name) for _, config in (first, second))) for field in fields(first[1])
    )
    return alone + [
        f"{name}: {one} in the first, {other} in the second"
        for name, one, other in values if name not in WITHOUT_EFFECT and one != other
    ]  # fmt: skip


def losses_compared(first: Saved, second: Saved) -> list[tuple[bool, str]]:
    """Of each pair of strategies whether the first steps that both have agree, and a sentence.

    They do not if there is no such step, or a loss is inf or NaN.
    """
    names = (list(comparison.summary["strategy"]) for comparison, _ in (first, second))
    return [_compared({"first": (pair[0], first), "second": (pair[1], second)}) for pair in pairs_of(*names)]


def _compared(pair: dict[str, tuple[str, Saved]]) -> tuple[bool, str]:
    one, other = pair.values()
    name = one[0] if one[0] == other[0] else f"{one[0]} and {other[0]}"
    found = ((which, run, not_finite(saved[0].records.steps)) for which, (run, saved) in pair.items())
    lost = {which: steps[run] for which, run, steps in found if run in steps}
    wrong = [f"that of the {which} run is not finite from step {step} on" for which, step in lost.items()]
    if wrong:
        return False, f"Losses of {name} are NOT equal: {' and '.join(wrong)}."
    losses = [losses_of(saved[0].records.steps)[run] for run, saved in (one, other)]
    apart = judged((losses[1] - losses[0]).abs().dropna())
    if not len(apart):
        return False, f"Losses of {name} cannot be compared: no step is in both."
    # That of the run that computes in the coarser numbers.
    tolerance = max(tolerance_of_run(run, saved.records, config.dtype) for run, (saved, config) in (one, other))
    largest = float(apart.max())
    equal = "equal" if largest <= tolerance else "NOT equal"
    said = f"Losses of {name} are {equal}: in {len(apart)} steps they differ by at most {largest:.1e}."
    if equal != "equal":
        manifests = {which: saved[0].records.manifests[run] for which, (run, saved) in pair.items()}
        others = others_than("first", manifests)
        said += f" Their data differ from step {others['second']} on." if others else ""
    return equal == "equal", said
