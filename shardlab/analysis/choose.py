"""Which run and step a table of one step is about."""

import pandas as pd


def one_run(frame: pd.DataFrame, run: str | None) -> pd.DataFrame:
    """The rows of ``run``; None where the table holds one run only.

    Raises:
        ValueError: no such run, several and none named, or one that is both measured and predicted.
    """
    names = list(dict.fromkeys(frame["run"].astype(str)))
    if run is None and len(names) > 1:
        raise ValueError(f"run: the table holds {len(names)} runs, name one of {', '.join(names)}")
    if run is not None and run not in names:
        raise ValueError(f"run: {run!r} is none of {', '.join(names)}")
    rows = frame if run is None else frame[frame["run"] == run]
    sources = list(dict.fromkeys(rows["source"].astype(str)))
    if len(sources) > 1:
        raise ValueError(
            f"source: the run {run or names[0]!r} is there as {' and as '.join(sources)}; keep one of them"
        )
    return rows


def one_step(frame: pd.DataFrame, step: int | None) -> int:
    """``step``, or the last one recorded for None.

    Raises:
        ValueError: it was not recorded, or nothing was.
    """
    steps = sorted({int(number) for number in frame["step"]})
    if not steps:
        raise ValueError("step: the table holds no steps")
    if step is not None and step not in steps:
        raise ValueError(f"step: {step} was not recorded; there are {steps[0]} to {steps[-1]}")
    return steps[-1] if step is None else step
