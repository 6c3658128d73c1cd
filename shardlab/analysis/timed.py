"""Which steps count where a run is judged by its times; and of these, the share of communication that compute hid."""

import numpy as np
import pandas as pd

from shardlab.analysis.overlap import hidden_by_rank, overlap
from shardlab.analysis.rows import KEYS
from shardlab.vocabulary import Phase


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
    found: pd.Series[bool] = of_rank.groupby([steps["run"], steps["step"]]).transform("any")
    return found


def in_steps(table: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``table`` that belong to one of ``steps``."""
    return table.merge(steps[KEYS], on=KEYS)


def in_timed_steps(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Collectives and spans of the steps whose times count, without what a training step sends to report its loss.

    Nor is there what was sent before its step began: the time in between is that of a recorder.
    """
    timed = timed_steps(steps)
    training = in_steps(collectives[collectives["phase"] != str(Phase.METRICS)], timed)
    if "start_us" in timed:
        began = training[KEYS].merge(timed[[*KEYS, "start_us"]], on=KEYS, how="left")["start_us"].to_numpy()
        later = training.assign(start_us=np.fmax(training["start_us"], began))
        training = later[~(training["end_us"] <= began)]
    return training, in_steps(spans, timed)


def hidden_share(collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """``hidden_by_rank`` over the steps whose times count, taken as one: a moment in which two communicate counts once.

    Holistic Trace Analysis finds the same in files of these steps, to their whole microseconds (``tests/export``).

    Args:
        collectives, spans, steps: the tables.

    Returns:
        ``run``, ``source``, ``rank``, ``overlap``: 0 to 1, NaN without communication or where it is not known.

    Raises:
        ValueError: see ``overlap``.
    """
    together = (table.assign(step=0) for table in in_timed_steps(collectives, spans, steps))
    return hidden_by_rank(overlap(*together))
