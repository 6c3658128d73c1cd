"""Which compute hid which collective, and how much of it stayed exposed.

A moment of a collective is hidden if its rank computes at that moment, and neither waits nor is off the CPU (see
``overlap``). It is hidden by the innermost span that is open then: by a block rather than by the model around it.
Collectives that are in flight together each count in full here, so their exposed times can add up to more than the
exposed time of the step, which counts each moment once.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, innermost
from shardlab.analysis.overlap import compute_spans
from shardlab.analysis.rows import KEYS, bounds, numbers, positions
from shardlab.tables import COLLECTIVES, SPANS

IDENTITY = [*KEYS, "seq", "axis", "op", "tag"]


def hidden_by(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """How long each unit hid each collective.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``; neither data loading nor time off the CPU counts as compute.

    Returns:
        One row per collective and unit that computed during it: the keys, ``seq``, ``axis``, ``op``, ``tag``, ``unit``,
        ``kind`` and ``hidden_us``. A collective that stayed exposed has no row.

    Raises:
        ValueError: columns or times are missing, or an interval ends before it begins.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    spans = compute_spans(spans)
    span_times = bounds(spans, "start_us", "end_us", "spans")
    comm_times = bounds(collectives, "start_us", "end_us", "collectives")
    waits = _waits(collectives)
    of_spans, found = positions(spans), []
    for key, here in positions(collectives).items():
        mine = of_spans.get(key)
        if mine is None:
            continue
        waiting = waits[here][np.isfinite(waits[here, 0])]
        pieces, owners = innermost(span_times[mine], waiting)
        found += [(here[row], mine[owner], us) for row, owner, us in _shares(comm_times[here], pieces, owners.tolist())]
    return _table(collectives, spans, found)


def attribution(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """How much of each collective was hidden behind compute, and which unit hid most of it.

    Returns:
        One row per collective: the keys, ``seq``, ``axis``, ``op``, ``tag``, ``duration_us``, ``hidden_us``,
        ``exposed_us``, ``hidden`` (share of the duration; NaN where it took no time), and ``unit``, ``kind`` and
        ``unit_us`` of the unit that hid most of it (NA where nothing did).

    Raises:
        ValueError: see ``hidden_by``.
    """
    shares = hidden_by(collectives, spans)
    most = shares.sort_values("hidden_us", ascending=False, kind="stable").drop_duplicates([*KEYS, "seq"])
    most = most[[*KEYS, "seq", "unit", "kind", "hidden_us"]].rename(columns={"hidden_us": "unit_us"})
    sums = shares.groupby([*KEYS, "seq"])["hidden_us"].sum().reset_index()
    times = bounds(collectives, "start_us", "end_us", "collectives")
    table = collectives[IDENTITY].assign(duration_us=times[:, 1] - times[:, 0])
    table = table.merge(sums, on=[*KEYS, "seq"], how="left")
    table["hidden_us"] = table["hidden_us"].astype("float64").fillna(0.0)
    table["exposed_us"] = table["duration_us"] - table["hidden_us"]
    table["hidden"] = (table["hidden_us"] / table["duration_us"]).where(table["duration_us"] > 0)
    return table.merge(most, on=[*KEYS, "seq"], how="left")


def _waits(collectives: pd.DataFrame) -> Intervals:
    """When the caller of each row waited; NaN if it did not wait."""
    waited = np.isfinite(numbers(collectives, "wait_start_us"))
    times = np.full((len(collectives), 2), np.nan)
    times[waited] = bounds(collectives[waited], "wait_start_us", "wait_end_us", "collectives")
    return times


def _shares(collectives: Intervals, pieces: Intervals, owners: list[int]) -> Iterator[tuple[int, int, float]]:
    """(collective, span, microseconds) for each overlap of the two; ``pieces`` are disjoint and sorted."""
    first = np.searchsorted(pieces[:, 1], collectives[:, 0], side="right")
    stop = np.searchsorted(pieces[:, 0], collectives[:, 1], side="left")
    for row, (start, end) in enumerate(collectives.tolist()):
        for place in range(first[row], stop[row]):
            common = min(end, float(pieces[place, 1])) - max(start, float(pieces[place, 0]))
            if common > 0:
                yield row, owners[place], common


def _table(collectives: pd.DataFrame, spans: pd.DataFrame, found: list[tuple[int, int, float]]) -> pd.DataFrame:
    """Rows of (collective, span, microseconds), summed by unit and kind, because waits may cut a span into pieces."""
    rows = collectives[IDENTITY].iloc[[row for row, _, _ in found]].reset_index(drop=True)
    hid = spans[["unit", "kind"]].iloc[[span for _, span, _ in found]].reset_index(drop=True)
    table = rows.join(hid).assign(hidden_us=np.array([us for _, _, us in found], dtype=np.float64))
    return table.groupby([*IDENTITY, "unit", "kind"], sort=False)["hidden_us"].sum().reset_index()
