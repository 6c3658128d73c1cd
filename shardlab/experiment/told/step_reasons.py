"""Why a step takes as long as it does, in sentences: the cause, its evidence, one change, and what it would gain."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from shardlab.analysis.rows import step_lengths
from shardlab.plots.text import format_percent, format_us, listing
from shardlab.records.store import Records
from shardlab.why.causes import causes
from shardlab.why.judged_steps import BALANCED, UNKNOWN, Cause

ALIKE = 0.1  # relative: causes that gain about the same are both named
SURE = 0.25  # of a step: what takes less is said with care
MOSTLY = 0.5  # of a step
NO_MESH = "the groups of ranks are not one mesh"  # of a script, which makes its own
COLUMNS = ("strategy", "cause", "of a step (ms)", "share (%)", "gain (ms)", "change", "evidence")
OPTION = re.compile(r" \(--[^)]*\)")  # of the command, which a script does not have


@dataclass(frozen=True)
class Reasons:
    """What the time of a run's steps consists of.

    Attributes:
        step_us: the median of it, in microseconds.
        causes: the primary one first.
        doubt: what may be wrong about all of them; empty where nothing is known to be.
    """

    step_us: float
    causes: tuple[Cause, ...]
    doubt: str = ""


def reasons(records: Records) -> dict[str, Reasons]:
    """Of each run: its causes, or that they cannot be said."""
    found = {}
    for run, own in records.steps.groupby("run", sort=False):
        collectives, spans = (table[table["run"] == run] for table in (records.collectives, records.spans))
        try:
            said = causes(collectives, spans, own, axes=records.manifests[str(run)].get("mesh"))
        except ValueError as error:  # ranks or times are missing, or clocks do not agree
            known = records.manifests[str(run)]
            has_no_mesh = "recorded" in known and known.get("mesh") is None and str(error).startswith("axes: ")
            why_not = NO_MESH if has_no_mesh else str(error)
            said = [Cause(UNKNOWN, 0.0, 0.0, why_not, "", 0.0)]
        step_us = float(step_lengths(own).median())
        found[str(run)] = Reasons(step_us, tuple(said), _doubt(records.manifests[str(run)]))
    return found


def _doubt(manifest: Mapping[str, Any]) -> str:
    """Of an imported trace, the kernels of which nobody knows whether they communicate."""
    names = list(manifest.get("uncertain_kernels", ()))
    more = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return f" · uncertain: {names[0]}{more} may communicate, and counts as compute" if names else ""


def why(found: Mapping[str, Reasons], *, is_script: bool = False) -> str:
    """One sentence: of one run its cause; of several, what is the cause in which, and which change gains most.

    Args:
        found: by run.
        is_script: the run is none of ``compare``, and has no options.
    """
    if len(found) == 1:
        (one,) = found.values()
        return (OPTION.sub("", of_one(one)) if is_script else of_one(one)) + one.doubt
    alike: dict[tuple[str, bool], list[str]] = {}
    for run, one in sorted(found.items(), key=lambda pair: -_weight(pair[1].causes[0])):
        alike.setdefault((one.causes[0].name, _computes_little(one.causes[0])), []).append(run)
    said = "; ".join(_together(name, {run: found[run].causes[0] for run in runs}) for (name, _), runs in alike.items())
    most = max(found, key=lambda run: found[run].causes[0].gain_us)
    best = found[most].causes[0]
    return f"{said} · {most} has most to gain: {_gain(best, found[most])}" if best.gain_us else said


def _weight(cause: Cause) -> float:
    """By which causes are ordered: what cannot be said comes last, and balanced before it."""
    return cause.share if cause.gain_us else float(cause.name == UNKNOWN) * -1


def _computes_little(cause: Cause) -> bool:
    """Whether a balanced step is none that is mostly compute, which is the share of it."""
    return cause.name == BALANCED and cause.share < MOSTLY


def _together(name: str, primary: Mapping[str, Cause]) -> str:
    """Runs with one primary cause: 'bandwidth in zero3 (61 % of a step) and fsdp (58 %)'."""
    if name == UNKNOWN:
        return f"of {listing(list(primary))} it {UNKNOWN}: {next(iter(primary.values())).evidence}"
    if name == BALANCED:
        little = any(map(_computes_little, primary.values()))
        compute = "though less than half is compute" if little else "mostly compute"
        return f"{BALANCED}, {compute}, in {listing(list(primary))}"
    shares = [f"{run} ({format_percent(cause.share)})" for run, cause in primary.items()]
    shares[0] = shares[0].replace(")", " of a step)")
    return f"{name} in {listing(shares)}"


def of_one(one: Reasons) -> str:
    """The causes of one run, the primary one with its evidence, its change and what that gains."""
    first, *others = one.causes
    if first.name in (UNKNOWN, BALANCED):
        return f"{first.name}: {first.evidence}"
    said = f"{_care(first)}{format_percent(first.share)} of a step is {first.name}: {first.evidence} · "
    said += _gain(first, one)
    second = next((other for other in others if other.gain_us >= (1 - ALIKE) * first.gain_us), None)
    return said if second is None else f"{said}; about as much: {second.name}, {format_us(second.gain_us)}"


def _care(cause: Cause) -> str:
    return "" if cause.share >= SURE else "about "


def _gain(cause: Cause, one: Reasons) -> str:
    return f"{cause.change} would take {_care(cause)}{format_us(cause.gain_us)} of {format_us(one.step_us)} off"


def reasons_table(found: Mapping[str, Reasons], *, is_script: bool = False) -> pd.DataFrame:
    """One row for each cause of each run, the primary one first; see ``why``."""

    def change_of(cause: Cause) -> str:
        change = re.sub(", at most,$", " (at most)", cause.change).rstrip(",")
        return OPTION.sub("", change) if is_script else change

    rows = [
        (run, cause.name, cause.us / 1e3, 100 * cause.share, cause.gain_us / 1e3, change_of(cause), cause.evidence)
        for run, one in found.items() for cause in one.causes
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.loc[table["cause"] == UNKNOWN, list(COLUMNS[2:5])] = float("nan")
    return table
