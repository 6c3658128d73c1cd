"""Which steps count where a run is judged by its times; and of these, the share of communication that compute hid.

And how many bytes of collectives are under way at once, in the traced step that has the peak and in ordinary ones.
Tracing memory slows compute, not communication. So at its peak a traced step may hold other buffers, and other copies
of them in the transport, than an ordinary step does, whose peak is not known on a CPU. When each collective was under
way is known of every step: where that differs, the peaks may differ too. (On a GPU this is not needed: the allocator
knows each step's peak, and tracing slows the host alone.)
"""

import numpy as np
import pandas as pd

from shardlab.analysis.overlap import hidden_by_rank, overlap
from shardlab.analysis.rows import KEYS, numbers, on_streams, positions
from shardlab.records.tables import COLLECTIVES, STEPS
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


def in_flight(collectives: pd.DataFrame) -> pd.DataFrame:
    """The most bytes under way at once in each step of each rank.

    A collective is under way, with the bytes of its whole buffer, from its issue until it has ended and the caller has
    waited for it. What reports the loss does not count, nor what a stream waits for: the host issues that ahead.

    Args:
        collectives: table ``collectives``.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``in_flight_bytes``; steps without such collectives have no row.

    Raises:
        ValueError: a column is missing.
    """
    COLLECTIVES.check(collectives)
    rows = collectives[(collectives["phase"] != str(Phase.METRICS)) & ~on_streams(collectives)]
    begins, sizes = numbers(rows, "issue_us"), numbers(rows, "bytes")
    ends = np.fmax(numbers(rows, "end_us"), numbers(rows, "wait_end_us"))  # (nobody may have waited: NaN)
    found = [(*key, _most(begins[here], ends[here], sizes[here])) for key, here in positions(rows).items()]
    return pd.DataFrame(found, columns=[*KEYS, "in_flight_bytes"])


def traced_and_ordinary(collectives: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """What was in flight at most, on the rank with the most: in the traced step with the peak, and in an ordinary one.

    Args:
        collectives: table ``collectives``.
        steps: table ``steps``.

    Returns:
        By run: ``traced_bytes``, and ``ordinary_bytes``, the median over the steps whose times count; NaN where there
        was no such step, and for runs in which streams wait.

    Raises:
        ValueError: a column is missing.
    """
    STEPS.check(steps)
    steps = steps.dropna(subset="wire_bytes")  # of a recorded script, not every step's collectives are watched
    steps = steps[~steps["run"].isin(collectives.loc[on_streams(collectives), "run"])]
    known = steps[[*KEYS, "peak_bytes"]].assign(traced=traced(steps)).merge(in_flight(collectives), on=KEYS, how="left")
    known = known.fillna({"in_flight_bytes": 0, "peak_bytes": 0})
    columns = ["peak_bytes", "in_flight_bytes"]
    by_step = known.groupby(["run", "step", "traced"], sort=False)[columns].max().reset_index()
    highest = by_step[by_step["traced"]].sort_values(["peak_bytes", "step"]).drop_duplicates("run", keep="last")
    counts = timed_steps(steps)[["run", "step"]].drop_duplicates()
    ordinary = by_step[~by_step["traced"]].merge(counts, on=["run", "step"])
    most = highest.set_index("run")["in_flight_bytes"]
    usual = ordinary.groupby("run", sort=False)["in_flight_bytes"].median()
    return pd.DataFrame({"traced_bytes": most, "ordinary_bytes": usual}).rename_axis("run")


def _most(begins: np.ndarray, ends: np.ndarray, sizes: np.ndarray) -> float:
    """The highest sum of sizes at one time; what ends when another begins is no longer there."""
    times = np.concatenate((ends, begins))
    changes = np.concatenate((-sizes, sizes))
    return float(np.cumsum(changes[np.argsort(times, kind="stable")]).max(initial=0.0))
