"""Gradients that are reduced in every micro-batch of a step, where once, after the last one, would do.

It is exact: a reduction is tagged with what it carries, and one with the same tag in a later backward of the step
carries the same gradients again.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.analysis.rows import KEYS, numbers, positions
from shardlab.vocabulary import FLAG, Collective, MeshAxis, Phase, SpanKind

REPEATED = "every micro-batch communicates"
CHANGE = "no_sync() around all micro-batches but the last (FSDP2: set_requires_gradient_sync(False))"
REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
SAME = [*KEYS, "axis", "op", "tag"]


def begins_of_backward(spans: pd.DataFrame) -> NDArray[np.float64]:
    """When a rank came from forward to backward in a step: once for each micro-batch."""
    kinds = spans["kind"].isin([str(SpanKind.BACKWARD), str(SpanKind.RECOMPUTE)])
    forward = numbers(spans[spans["kind"] == str(SpanKind.FORWARD)], "start_us")
    backward = np.sort(numbers(spans[kinds], "start_us"))
    firsts = np.unique(np.searchsorted(backward, np.append(forward, -np.inf)))
    return backward[firsts[firsts < len(backward)]]


def repeated(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """The rows that a later reduction of the same gradients in their step makes superfluous."""
    is_sent = (collectives["phase"] == str(Phase.BACKWARD)) & collectives["op"].isin(map(str, REDUCTIONS))
    rows = collectives[is_sent & (collectives["tag"] != FLAG) & (collectives["axis"] != str(MeshAxis.TENSOR))]
    backward, of_spans = np.zeros(len(rows), dtype=np.int64), positions(spans)
    for key, here in positions(rows).items():
        if key in of_spans:
            begins = begins_of_backward(spans.iloc[of_spans[key]])
            backward[here] = np.searchsorted(begins, numbers(rows, "issue_us")[here], side="right")
    same = rows.assign(backward=backward).groupby(SAME, sort=False)
    # Twice in one backward is another thing: a strategy that tags all of its messages alike.
    once_each = same["backward"].transform("size") == same["backward"].transform("nunique")
    return rows[once_each & (rows["seq"] != same["seq"].transform("max"))]


def evidence(rows: pd.DataFrame, num_steps: int) -> str:
    """What is sent again and again, in words.

    Args:
        rows: those of ``repeated``, of one rank.
        num_steps: how many steps they are of.
    """
    what = rows.groupby(["step", "axis", "op", "tag"])
    count, times = round(what.ngroups / num_steps), 1 + round(what.size().median())
    size = rows["bytes"].sum() / num_steps / 1e6
    return f"each of {count} reductions of gradients is sent {times} times a step, {size:.3g} MB of it before the last"
