"""Why a step takes as long as it does, in sentences: the cause, its evidence, one change, and what it would gain."""

from collections.abc import Mapping

import pandas as pd

from shardlab.analysis.causes import BALANCED, UNKNOWN, Cause, causes
from shardlab.analysis.rows import labelled, labels_of
from shardlab.analysis.timed import timed_steps
from shardlab.experiment.answer import Line
from shardlab.plots.text import format_percent

ALIKE = 0.1  # relative: causes that gain about the same are both named
SURE = 0.25  # of a step: what takes less is said with care


def why(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> list[Line]:
    """One line for each run of a record.

    Args:
        collectives, spans, steps: the tables of one run or of several.
        axes: sizes of the axes of the mesh, see ``with_group``.
    """
    steps = labelled(steps)
    lines = []
    for run in labels_of(steps):
        own = steps[steps["label"] == run].drop(columns="label")
        names = own[["run", "source"]].drop_duplicates()
        try:
            found = causes(collectives.merge(names), spans.merge(names), own, axes=axes)
        except ValueError as error:  # ranks or times are missing, or clocks do not agree
            found = [Cause(UNKNOWN, 0.0, 0.0, str(error), "", 0.0)]
        timed = timed_steps(own)
        step_us = float(timed.groupby("step")["step_us"].median().median())
        lines.append(Line("WHY", f"{run}: {sentence(found, step_us)}"))
    return lines


def sentence(found: list[Cause], step_us: float) -> str:
    """What the causes of a step of ``step_us`` microseconds say, the primary cause first."""
    first, *others = found
    if first.name == UNKNOWN:
        return f"{UNKNOWN}: {first.evidence}"
    if first.name == BALANCED:
        return f"{BALANCED}: {first.evidence}"
    about = "" if first.share >= SURE else "about "
    said = f"{about}{format_percent(first.share)} of a step is {first.name}: {first.evidence}"
    said += f" · {first.change} would take {about}{first.gain_us / 1e3:.3g} of {step_us / 1e3:.3g} ms off"
    second = next((one for one in others if one.gain_us >= (1 - ALIKE) * first.gain_us), None)
    return said if second is None else f"{said}; about as much: {second.name} ({second.gain_us / 1e3:.3g} ms)"
