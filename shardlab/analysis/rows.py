"""Choosing rows of a record, by run, rank and step, and reading their times as intervals.

And which steps count where a run is judged by its times (``timed_steps``).
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.analysis.intervals import Intervals
from shardlab.records.tables import STREAM_TRANSPORTS
from shardlab.vocabulary import Phase, SpanKind

KEYS = ["run", "source", "rank", "step"]

Key = tuple[str, str, int, int]


def require_columns(frame: pd.DataFrame, columns: Sequence[str], table: str, origin: str = "") -> None:
    """Check that a frame has all ``columns``; ``origin`` says where such a table comes from.

    Raises:
        ValueError: columns are missing; the message names them.
    """
    if missing := [name for name in columns if name not in frame.columns]:
        raise ValueError(f"{table}: missing columns {missing}; {origin or 'needs ' + ', '.join(columns)}")


def bounds(frame: pd.DataFrame, start: str, end: str, table: str) -> Intervals:
    """The columns ``start`` and ``end`` as intervals, one for each row.

    Raises:
        ValueError: a time is missing, or the clock ran backwards; the message names the row.
    """
    times = np.column_stack((numbers(frame, start), numbers(frame, end)))
    missing = ~np.isfinite(times)
    if missing.any():
        row, column = (int(index) for index in np.argwhere(missing)[0])
        raise ValueError(f"{_name(frame, row, table)} has no {(start, end)[column]}; every row needs a time")
    backwards = times[:, 1] < times[:, 0]
    if backwards.any():
        row = int(np.argmax(backwards))
        raise ValueError(
            f"{_name(frame, row, table)} ends before it begins: "
            f"{end} {times[row, 1]:g} < {start} {times[row, 0]:g}; the clock ran backwards"
        )
    return times


def on_streams(collectives: pd.DataFrame) -> "pd.Series[bool]":
    """Whether a stream of a GPU waited for each collective, and not the host, which issued it ahead of the stream."""
    return collectives["transport"].astype(str).str.startswith(STREAM_TRANSPORTS)


def numbers(frame: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """A column as float64, missing values as NaN."""
    return frame[column].to_numpy(dtype=np.float64, na_value=np.nan)


def positions(frame: pd.DataFrame) -> dict[Key, NDArray[np.intp]]:
    """Positions of the rows of each (run, source, rank, step), in order of first appearance."""
    if not len(frame):
        return {}
    indices = cast("dict[Key, NDArray[np.intp]]", frame.groupby(KEYS, sort=False).indices)
    return {(str(run), str(source), int(rank), int(step)): rows for (run, source, rank, step), rows in indices.items()}


def _name(frame: pd.DataFrame, row: int, table: str) -> str:
    """A row as an error names it: table, index label, run, rank, step, and its tag or unit."""
    values = frame.iloc[row]
    what = next((str(values[column]) for column in ("tag", "unit") if column in frame.columns), "")
    return (
        f"table {table!r}: row {frame.index[row]} "
        f"(run {values['run']}, rank {values['rank']}, step {values['step']}, {what!r})"
    )


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column ``label``: the run, and its source where one table holds the run from several sources."""
    sources = frame.groupby("run")["source"].transform("nunique") if len(frame) else pd.Series(dtype="int64")
    run, source = frame["run"].astype(str), frame["source"].astype(str)
    return frame.assign(label=run.where(sources <= 1, run + " · " + source))


def labels_of(frame: pd.DataFrame) -> list[str]:
    """Labels in order of first appearance."""
    return [str(label) for label in frame["label"].drop_duplicates()]


def one_run(frame: pd.DataFrame, run: str | None) -> pd.DataFrame:
    """The rows of ``run`` with a column ``label``; None where the table holds one run only.

    A run that is both measured and predicted counts as two, named 'zero1 · measured' and 'zero1 · predicted'.

    Raises:
        ValueError: no such run, or several and none named.
    """
    rows = labelled(frame)
    names = labels_of(rows)
    if run is None and len(names) > 1:
        raise ValueError(f"run: the table holds {len(names)} runs, name one of {', '.join(names)}")
    if run is not None and run not in names:
        raise ValueError(f"run: {run!r} is not one of {', '.join(names)}")
    return rows if run is None else rows[rows["label"] == run]


def one_step(frame: pd.DataFrame, step: int | None) -> int:
    """``step``, or the last one recorded for None; what was sent before the first (-1) is no step.

    Raises:
        ValueError: it was not recorded, or nothing was.
    """
    steps = sorted({int(number) for number in frame["step"] if number >= 0})
    if not steps:
        raise ValueError("step: the table holds no steps")
    if step is not None and step not in steps:
        raise ValueError(f"step: {step} was not recorded; there are {steps[0]} to {steps[-1]}")
    return steps[-1] if step is None else step


def one_step_of_run(
    collectives: pd.DataFrame, spans: pd.DataFrame, run: str | None, step: int | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The collectives and the spans of one step of one run.

    Returns:
        Rows of ``collectives``, rows of ``spans``, and of all of them ``run``, ``source``, ``step`` and ``label``.

    Raises:
        ValueError: see ``one_run`` and ``one_step``.
    """
    of_run = one_run(pd.concat([table[["run", "source", "step"]] for table in (spans, collectives)]), run)
    of_step = of_run[of_run["step"] == one_step(of_run, step)]
    keys = of_step[["run", "source", "step"]].iloc[0]
    rows = [table[(table[keys.index] == keys).all(axis=1)] for table in (collectives, spans)]
    return rows[0], rows[1], of_step


def begins_of_backward(spans: pd.DataFrame) -> NDArray[np.float64]:
    """When a rank came from forward to backward in a step: once for each micro-batch."""
    kinds = spans["kind"].isin([str(SpanKind.BACKWARD), str(SpanKind.RECOMPUTE)])
    forward = numbers(spans[spans["kind"] == str(SpanKind.FORWARD)], "start_us")
    backward = np.sort(numbers(spans[kinds], "start_us"))
    firsts = np.unique(np.searchsorted(backward, np.append(forward, -np.inf)))
    return backward[firsts[firsts < len(backward)]]


def timed_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps whose times count: those of a run after the first and without tracing, or all if none is left.

    A run that goes on from a checkpoint begins anew: its first step allocates and warms up as step 0 does. An imported
    profile begins behind its warm-up, at a later step; it knows no learning rate, by which it is told apart.

    Args:
        steps: table ``steps``.
    """
    of_run = steps.groupby("run")
    first, is_profile = of_run["step"].transform("min"), of_run["learning_rate"].transform("count") == 0
    warms_up = (steps["step"] == first) & ((first == 0) | ~is_profile)
    counts = ~traced(steps) & ~warms_up
    return steps[counts | ~counts.groupby(steps["run"]).transform("any")]


def step_lengths(steps: pd.DataFrame) -> "pd.Series[float]":
    """How long the steps are whose times count, in microseconds by ``run`` and ``step``: the median over the ranks.

    A rank's step lasts from before it takes its first batch until its parameters are stepped. What sends the loss, to
    report it, comes after it.

    Args:
        steps: table ``steps``.
    """
    return timed_steps(steps).groupby(["run", "step"])["step_us"].median()


def traced(steps: pd.DataFrame) -> "pd.Series[bool]":
    """For each row, whether memory was traced in its step on some rank: the others have waited for that one."""
    of_rank = steps["traced_memory"].fillna(False).astype(bool)
    return of_rank.groupby([steps["run"], steps["step"]]).transform("any")


def in_steps(table: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``table`` that belong to one of ``steps``."""
    return table.merge(steps[KEYS], on=KEYS)


def of_steps(collectives: pd.DataFrame) -> pd.DataFrame:
    """The collectives without what is sent after a step, to report its loss."""
    return collectives[(collectives["phase"] != str(Phase.METRICS)).fillna(True)]


def in_timed_steps(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Collectives and spans of the steps whose times count, without what a training step sends to report its loss.

    Nor is there what was sent before its step began: the time in between is that of a recorder.
    """
    timed = timed_steps(steps)
    training = in_steps(of_steps(collectives), timed)
    if "start_us" in timed:
        began = training[KEYS].merge(timed[[*KEYS, "start_us"]], on=KEYS, how="left")["start_us"].to_numpy()
        later = training.assign(start_us=np.fmax(training["start_us"], began))
        training = later[~(training["end_us"] <= began)]
    return training, in_steps(spans, timed)
