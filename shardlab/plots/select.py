"""Which run and step a picture of one step shows."""

import pandas as pd


def one_run(frame: pd.DataFrame, run: str | None) -> pd.DataFrame:
    """The rows of ``run``; None where the table holds one run only.

    Raises:
        ValueError: no such run, or several and none named.
    """
    names = [str(name) for name in frame["run"].drop_duplicates()]
    if run is None and len(names) > 1:
        raise ValueError(f"run: the table holds {len(names)} runs, name one of {', '.join(names)}")
    if run is not None and run not in names:
        raise ValueError(f"run: {run!r} is none of {', '.join(names)}")
    return frame[frame["run"] == (names[0] if run is None else run)]
