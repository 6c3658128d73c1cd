"""Which run a picture of one run shows."""

import pandas as pd

from shardlab.plots.labels import labelled, labels_of


def one_run(frame: pd.DataFrame, run: str | None) -> pd.DataFrame:
    """The rows of ``run``; None where the table holds one run only.

    A run that is both measured and predicted counts as two, named 'zero1 · measured' and 'zero1 · predicted'.

    Raises:
        ValueError: no such run, or several and none named.
    """
    rows = labelled(frame)
    names = labels_of(rows)
    if run is None and len(names) > 1:
        raise ValueError(f"run: the table holds {len(names)} runs, name one of {', '.join(names)}")
    if run is not None and run not in names:
        raise ValueError(f"run: {run!r} is none of {', '.join(names)}")
    return rows[rows["label"] == (names[0] if run is None else run)]
