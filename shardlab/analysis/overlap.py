"""Overlap: the share of communication time that compute hides, as Holistic Trace Analysis defines it.

On each rank, with the intervals of communication merged (M) and those of compute merged (C)::

    overlap = |M and C| / |M|          exposed = |M| - |M and C|

Without communication there is no number (NaN), not 0 and not 1. A span of compute is forward, backward, recomputation
or optimizer work; spans nest, and merging counts each moment once. A rank that sits in ``wait`` does not compute,
though the span of the module round it goes on: those stretches are taken out of C, else a fully exposed gather inside a
forward pass would count as hidden.
"""

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, intersect, merge, subtract, total
from shardlab.analysis.rows import KEYS, Key, bounds, numbers, positions
from shardlab.tables import COLLECTIVES, SPANS
from shardlab.vocabulary import SpanKind

COMPUTE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.RECOMPUTE, SpanKind.OPTIMIZER)


def overlap(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """Communication, compute and what they share, for each run, rank and step.

    Args:
        collectives: table ``collectives``; a row without ``end_us`` is refused.
        spans: table ``spans``.

    Returns:
        One row per (run, source, rank, step) of either table: ``comm_us``, ``compute_us`` (lengths of the merged
        intervals), ``both_us``, ``overlap`` (0 to 1; NaN without communication), ``exposed_us``.
        Runs in order of first appearance, among the spans first.

    Raises:
        ValueError: columns are missing, a time is missing, or an interval ends before it begins.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    compute_spans = spans[spans["kind"].isin([str(kind) for kind in COMPUTE_KINDS])]
    communication = _by_step(collectives, bounds(collectives, "start_us", "end_us", "collectives"))
    waiting = _by_step(*_waits(collectives))
    compute = _by_step(compute_spans, bounds(compute_spans, "start_us", "end_us", "spans"))
    keys = dict.fromkeys([*positions(spans), *communication])
    order = {name: place for place, name in enumerate(dict.fromkeys(key[:2] for key in keys))}
    none = np.empty((0, 2))
    rows = [
        (*key, *_measure(communication.get(key, none), subtract(compute.get(key, none), waiting.get(key, none))))
        for key in sorted(keys, key=lambda key: (order[key[:2]], key))
    ]
    columns = [*KEYS, "comm_us", "compute_us", "both_us", "overlap", "exposed_us"]
    return pd.DataFrame(rows, columns=columns)


def _measure(communication: Intervals, compute: Intervals) -> tuple[float, float, float, float, float]:
    """(comm, compute, both, overlap, exposed) of one rank's step; both arguments in microseconds."""
    merged = merge(communication)
    comm_us, both_us = total(merged), total(intersect(merged, compute))
    return comm_us, total(compute), both_us, both_us / comm_us if comm_us else float("nan"), comm_us - both_us


def _waits(collectives: pd.DataFrame) -> tuple[pd.DataFrame, Intervals]:
    """The rows whose caller waited, and when."""
    waited = collectives[np.isfinite(numbers(collectives, "wait_start_us"))]
    return waited, bounds(waited, "wait_start_us", "wait_end_us", "collectives")


def _by_step(frame: pd.DataFrame, times: Intervals) -> dict[Key, Intervals]:
    return {key: times[where] for key, where in positions(frame).items()}
