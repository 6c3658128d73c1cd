"""How many bytes of collectives are under way at once, in the step whose memory was traced and in ordinary ones.

Tracing memory slows compute, not communication. So at its peak a traced step may hold other buffers, and other copies
of them in the transport, than an ordinary step does, whose peak is not known on a CPU. When each collective was under
way is known of every step: where that differs, the peaks may differ too. (On a GPU this is not needed: the allocator
knows each step's peak, and tracing slows the host alone.)
"""

import numpy as np
import pandas as pd

from shardlab.analysis.rows import KEYS, numbers, on_streams, positions
from shardlab.analysis.timed import timed_steps
from shardlab.tables import COLLECTIVES, STEPS
from shardlab.vocabulary import Phase


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
    """What was in flight at most, on the rank with the most: in the traced step, and in an ordinary one.

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
    known = steps[[*KEYS, "traced_memory"]].merge(in_flight(collectives), on=KEYS, how="left")
    known = known.fillna({"in_flight_bytes": 0})
    by_step = known.groupby(["run", "step", "traced_memory"], sort=False)["in_flight_bytes"].max().reset_index()
    traced = by_step[by_step["traced_memory"]]
    counts = timed_steps(steps)[["run", "step"]].drop_duplicates()
    ordinary = by_step[~by_step["traced_memory"]].merge(counts, on=["run", "step"])
    most = traced.groupby("run", sort=False)["in_flight_bytes"].max()
    usual = ordinary.groupby("run", sort=False)["in_flight_bytes"].median()
    return pd.DataFrame({"traced_bytes": most, "ordinary_bytes": usual}).rename_axis("run")


def _most(begins: np.ndarray, ends: np.ndarray, sizes: np.ndarray) -> float:
    """The highest sum of sizes at one time; what ends when another begins is no longer there."""
    times = np.concatenate((ends, begins))
    changes = np.concatenate((-sizes, sizes))
    return float(np.cumsum(changes[np.argsort(times, kind="stable")]).max(initial=0.0))
