"""Which steps count where a run is judged by its times, and the share of communication that compute hid in them."""

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
    counts = ~steps["traced_memory"] & ~warms_up
    return steps[counts | ~counts.groupby(steps["run"]).transform("any")]


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

    Holistic Trace Analysis finds the same in the files of ``export.export_hta``, to their whole microseconds: they hold
    these steps and an empty last one, because it leaves out the last step of a trace.

    Args:
        collectives, spans, steps: the tables.

    Returns:
        ``run``, ``source``, ``rank``, ``overlap``: 0 to 1, NaN without communication or where it is not known.

    Raises:
        ValueError: see ``overlap``.
    """
    together = (table.assign(step=0) for table in in_timed_steps(collectives, spans, steps))
    return hidden_by_rank(overlap(*together))
