"""What the recorder observed in a step, as raw columns of its entry (``entries.py``), which must read without torch."""

from collections.abc import Iterable, Sequence
from math import isnan, nan
from operator import attrgetter
from typing import Any

from shardlab.comm import CollectiveEvent
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.records.entries import Columns
from shardlab.trace.clock import Clock, CpuReading, Mark
from shardlab.vocabulary import Phase, SpanKind

Row = dict[str, Any]
Span = tuple[str, SpanKind, Mark, Mark]
"""A unit at work from one mark of the clock to another."""

_FACTS = ("axis", "op", "tag", "dtype", "numel", "bytes", "group_size", "transport")
_TIMES = ("issue_ns", "start_ns", "end_ns", "wait_start_ns", "wait_end_ns")
_facts_of = attrgetter(*("num_bytes" if name == "bytes" else name for name in _FACTS))
_times_of = attrgetter(*_TIMES)


def collective_columns(
    events: Sequence[tuple[CollectiveEvent, Phase]], first_seq: int, clock: Clock, origin_ns: int
) -> Columns:
    """Columns of ``collectives``; on a stream the times are the device's, waits too, else those of the queue.

    Args:
        events: all of them ended, with the phase in which each was issued.
        first_seq: position of the first among the rank's collectives.
        clock: of the compute, settled.
        origin_ns: from where times count.
    """
    if not events:
        return {}
    heard, phases = zip(*events, strict=True)
    for event in heard:
        if event.device_times is not None:
            event.start_ns, event.end_ns = clock.resolve(event.device_times)
            event.wait_start_ns = event.wait_end_ns = nan  # of the host, which went on
        if event.device_wait is not None:
            *begins, end_ns = clock.resolve(event.device_wait)
            event.wait_start_ns, event.wait_end_ns = max(begins), max(*begins, end_ns)
    facts = zip(_FACTS, zip(*map(_facts_of, heard), strict=True), strict=True)
    times = zip(_TIMES, zip(*map(_times_of, heard), strict=True), strict=True)
    return {
        "seq": list(range(first_seq, first_seq + len(heard))), "phase": phases,
        "wire_bytes": list(map(wire_bytes, heard)), "moved_bytes": list(map(moved_bytes, heard)),
        **dict(facts), **{name: _since(origin_ns, column) for name, column in times},
    }  # fmt: skip


def carried_columns(events: Sequence[CollectiveEvent], end_ns: int, origin_ns: int) -> Columns:
    """When collectives of earlier steps were under way and waited for, until a step's end; not a table."""
    times = {name: [getattr(event, name) for event in events] for name in _TIMES}
    for name in ("start_ns", "end_ns"):
        times[name] = [end_ns if isnan(time_ns) else time_ns for time_ns in times[name]]
    return {name: _since(origin_ns, column) for name, column in times.items()} if events else {}


def wire_bytes(event: CollectiveEvent) -> float:
    """Bytes that the algorithm needs this rank to send, by the ring formula."""
    return ring_wire_bytes(event.op, event.num_bytes, event.group_size, event.own_chunk_bytes)


def moved_bytes(event: CollectiveEvent) -> float:
    """Bytes that this rank's transport sends; NaN for NCCL, which does not say what it does.

    The transports of this package send what the ring formula says; of a broadcast, on average over the ranks.
    """
    if event.torch_moves is not None:
        return event.torch_moves
    return nan if "nccl" in event.transport else wire_bytes(event)


def span_columns(spans: Sequence[Span], clock: Clock, origin_ns: int) -> Columns:
    """Columns of ``spans``, with the waits still inside."""
    if not spans:
        return {}
    units, kinds, begins, ends = zip(*spans, strict=True)
    return {
        "unit": units, "kind": kinds,
        "start_ns": _since(origin_ns, clock.resolve(begins)), "end_ns": _since(origin_ns, clock.resolve(ends)),
    }  # fmt: skip


def cpu_columns(readings: Sequence[CpuReading], origin_ns: int) -> Columns:
    """When the CPU time of the computing thread was read, and what it was; not a table, but the source of spans."""
    if not readings:
        return {}
    times, used, queued = zip(*readings, strict=True)
    return {"time_ns": _since(origin_ns, times), "cpu_ns": used, "queued_ns": queued}


def columns_of(rows: Sequence[Row]) -> Columns:
    """Rows with the same names, as columns."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _since(origin_ns: int, times: Iterable[float]) -> list[float]:
    """Host times from the start of the run; NaN stays NaN."""
    return [time_ns - origin_ns for time_ns in times]
