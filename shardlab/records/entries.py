"""One step of one rank as an entry of the rank's stream: written raw, read as rows of the five tables.

An entry is one MessagePack object: run, source, rank, step, and for each table one list per column. A rank in training
writes only what it has at hand: times are integer nanoseconds since the start of the run, under names that end in
``_ns``; spans are as they were marked, waits included; beside them stand readings of the CPU time that the computing
thread had used. The reader turns times into microseconds, takes waits and stretches off the CPU out of the spans and
adds up the traffic of the step. Reading needs no torch.

The arithmetic of intervals is plain Python here; ``analysis.intervals`` says the same for whole tables with numpy. A
step has a few dozen intervals, and a run thousands of steps that are worked on one by one: numpy's fixed cost of ten
microseconds a call would be most of reading one.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, pairwise
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import msgpack

from shardlab.records import journal
from shardlab.records.tables import COLLECTIVES, KEYS, SPANS, STEPS, STREAM_TRANSPORTS, TABLES, Table
from shardlab.vocabulary import COMPUTE_KINDS, WHOLE_MODEL, Phase, SpanKind

Columns = Mapping[str, Sequence[Any]]
"""A table by columns, all of one length."""
Entry = Mapping[str, Any]
Interval = tuple[float, float]
Reading = tuple[float, float, float]
"""When, how much CPU time the thread had used, and how long it had been queued for a core; in microseconds."""
Span = tuple[str, str, Interval]
"""Unit, kind and times."""
CPU = "cpu"
"""Readings of the computing thread's CPU time; an entry of compute on a stream has none."""
CARRIED = "carried"
"""Times of collectives that earlier steps issued and that were under way in this one; their rows are in those steps."""
CHUNK_BYTES = 2**20
SEEN_US = 20.0  # less time off the CPU than this between two readings is not told from their own inaccuracy
_WAIT = ("wait_start_us", "wait_end_us")
_UNKNOWN_TRAFFIC = {name: [nan] for name in ("exposed_comm_us", "overlap", "wire_bytes")}


def read(path: Path) -> Iterator[dict[str, Columns]]:
    """The tables of each entry of one rank so far, each with all of its columns.

    Args:
        path: of the file, which may grow meanwhile.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    try:
        for chunk in journal.read(path, CHUNK_BYTES):
            # A chunk may end inside an entry, whose beginning the unpacker keeps until the rest comes.
            unpacker.feed(chunk)
            yield from map(_tables, unpacker)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise ValueError(f"run: {path} is damaged: {error!r}") from error


def joined(entries: Iterable[Mapping[str, Columns]], table: Table) -> dict[str, list[Any]]:
    """The columns of one table over all entries; some of them may lack that table."""
    columns: dict[str, list[Any]] = {name: [] for name in table.column_names}
    for entry in entries:
        if table.name in entry:
            for name, values in columns.items():
                values += entry[table.name][name]
    return columns


def in_us(columns: Columns) -> Columns:
    """The columns with microseconds in place of nanoseconds."""
    return dict(_column_in_us(name, values) for name, values in columns.items())


def _column_in_us(name: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    if not name.endswith("_ns"):
        return name, values
    return name.removesuffix("_ns") + "_us", [value / 1e3 for value in values]


def _tables(entry: Entry) -> dict[str, Columns]:
    tables = {name: in_us(entry[name]) for name in TABLES if entry.get(name)}
    collectives = tables.get(COLLECTIVES.name, {})
    carried = in_us(entry.get(CARRIED) or {})
    queued_us = nan
    if SPANS.name in tables or entry.get(CPU):
        waits = [*_intervals(collectives, *_WAIT), *_intervals(carried, *_WAIT)]
        tables[SPANS.name], queued_us = _cut(tables.get(SPANS.name, {}), waits, _readings(in_us(entry.get(CPU) or {})))
    if (steps := tables.get(STEPS.name)) is not None:
        is_watched = all(steps.get("watched", ()))  # a record from outside leaves some steps out
        spans = tables.get(SPANS.name, {})
        traffic = _traffic(collectives, carried, spans, _time_of(steps)) if is_watched else _UNKNOWN_TRAFFIC
        tables[STEPS.name] = {**steps, **traffic, "queued_us": [queued_us]}
    keys = {column.name: entry[column.name] for column in KEYS}
    return {name: _whole(TABLES[name], columns, keys) for name, columns in tables.items() if columns}


def _whole(table: Table, columns: Columns, keys: Mapping[str, Any]) -> Columns:
    count = len(next(iter(columns.values())))
    absent = {column.name: [None] * count for column in table.columns if column.optional}
    columns = {**absent, **{name: [value] * count for name, value in keys.items()}, **columns}
    return {name: columns[name] for name in table.column_names}


def _time_of(steps: Columns) -> Interval:
    """From when until when the step lasted; for ever where an older entry does not say when it began."""
    (start_us,) = steps.get("start_us", (-inf,))
    return start_us, start_us + steps["step_us"][0] if start_us > -inf else inf


def _readings(columns: Columns) -> list[Reading]:
    times = columns.get("time_us", ())
    return list(zip(times, columns.get("cpu_us", ()), columns.get("queued_us", [nan] * len(times)), strict=True))


def _cut(spans: Columns, waited: Iterable[Interval], readings: Sequence[Reading]) -> tuple[Columns, float]:
    """The spans without the time in which the rank waited or was off the CPU; one row for each remaining piece.

    A stretch off the CPU becomes a row of its own, with the innermost unit. Not while data is loaded: who waits for a
    disk or another process there is told by that span.

    Returns:
        Those, and for how long of the stretches off the CPU the rank could have run, but had no core.
    """
    # A collective that nobody waited for has NaN there, and no comparison with NaN is true.
    waits = merged((start, end) for start, end in waited if end > start)
    marked: list[Span] = list(zip(spans.get("unit", ()), spans.get("kind", ()), _intervals(spans), strict=True))
    loading = merged(times for _, kind, times in marked if kind == SpanKind.DATA)
    away, queued_us = [], 0.0
    for stretch, queued in off_cpu(readings, waits):
        outside = [piece for found in stretch for piece in without(found, loading)]
        away += outside
        queued_us += min(queued, sum(end - start for start, end in outside))
    holes = merged([*waits, *away])
    pieces = [
        (unit, kind, *piece)
        for unit, kind, times in marked
        for piece in without(times, waits if kind == SpanKind.DATA else holes)
    ]
    pieces += [(_unit_at(end, marked), SpanKind.OFF_CPU, start, end) for start, end in merged(away)]
    names = ("unit", "kind", "start_us", "end_us")
    columns = dict(zip(names, zip(*pieces, strict=True), strict=True)) if pieces else {}
    return columns, queued_us if readings else nan


def off_cpu(readings: Iterable[Reading], waits: Sequence[Interval]) -> Iterator[tuple[list[Interval], float]]:
    """When the computing thread neither ran nor waited for a collective; only how long, between two readings, is known.

    Args:
        readings: in order of time. Between two of them the rank was off the CPU for as
            long as it neither waited nor used CPU time. That time is placed last, just before the second reading: a
            mark comes first, then the compute that it announces.
        waits: merged.

    Yields:
        Between two readings: the intervals, and for how long the thread was queued for a core meanwhile.
    """
    for (start, used, queued), (end, used_then, queued_then) in pairwise(readings):
        active = without((start, end), waits)
        left = sum(last - first for first, last in active) - (used_then - used)
        if left < SEEN_US:
            continue
        found = []
        for first, last in reversed(active):
            found.append((max(first, last - left), last))
            left -= last - first
            if left <= 0:
                break
        yield found[::-1], queued_then - queued


def _unit_at(moment: float, spans: Iterable[Span]) -> str:
    """The innermost unit just before a moment."""
    around = [(start, -end, unit) for unit, _, (start, end) in spans if start < moment <= end]
    return max(around, default=(0.0, 0.0, WHOLE_MODEL))[2]


def _traffic(collectives: Columns, carried: Columns, spans: Columns, time: Interval) -> Columns:
    """The communication columns of table ``steps``, without what the training step sends to report its loss.

    What travels outside of the step's ``time`` counts in the next step, or in none while a recorder works in between.
    """
    own = [phase != Phase.METRICS for phase in collectives.get("phase", ())]
    compute = [
        unit == WHOLE_MODEL and kind in COMPUTE_KINDS
        for unit, kind in zip(spans.get("unit", ()), spans.get("kind", ()), strict=True)
    ]
    sent = (*compress(_intervals(collectives), own), *_intervals(carried))
    here = ((max(start, time[0]), min(end, time[1])) for start, end in sent)
    exposed, overlap = exposure(here, compress(_intervals(spans), compute))
    if any(compress(_unseen(collectives), own)):
        exposed = overlap = nan
    wire_bytes = sum(map(float, compress(collectives.get("wire_bytes", ()), own)))
    return {"exposed_comm_us": [exposed], "overlap": [overlap], "wire_bytes": [wire_bytes]}


def _unseen(collectives: Columns) -> Iterator[bool]:
    """For each collective, whether it ran on a stream and its wait was not seen."""
    waits = zip(collectives.get("transport", ()), collectives.get("wait_start_us", ()), strict=True)
    return (transport.startswith(STREAM_TRANSPORTS) and isnan(start_us) for transport, start_us in waits)


def _intervals(columns: Columns, start: str = "start_us", end: str = "end_us") -> Iterator[Interval]:
    return zip(columns.get(start, ()), columns.get(end, ()), strict=True)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as sorted, disjoint intervals; empty ones are dropped."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def without(span: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """What is left of ``span`` outside of ``holes``, which are merged."""
    start, end = span
    if not holes or end <= holes[0][0] or start >= holes[-1][1]:  # most spans of a step
        return [span] if end > start else []
    pieces = []
    place = max(bisect_right(holes, start, key=lambda hole: hole[0]) - 1, 0)
    for hole_start, hole_end in holes[place:]:
        if hole_start >= end:
            break
        if hole_start > start:
            pieces.append((start, hole_start))
        start = max(start, hole_end)
    if end > start:
        pieces.append((start, end))
    return pieces


def exposure(communication: Iterable[Interval], compute: Iterable[Interval]) -> tuple[float, float]:
    """(exposed time, overlap) of one step, as in ``analysis.overlap``; NaN where nothing was communicated."""
    union = merged(communication)
    length = sum(end - start for start, end in union)
    if length == 0:
        return nan, nan
    busy = merged(compute)
    exposed = sum(end - start for span in union for start, end in without(span, busy))
    return exposed, (length - exposed) / length
