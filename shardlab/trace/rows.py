"""Rows of one step, made when it is over, from what the recorder has heard."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from shardlab.analysis.memory import WHOLE_STEP
from shardlab.analysis.overlap import COMPUTE_KINDS
from shardlab.comm import CollectiveEvent
from shardlab.trace.allocator import Allocator
from shardlab.trace.clock import Mark, TimeAxis
from shardlab.trace.memory import ByRole
from shardlab.trace.spans import Interval, exposure, merged, without
from shardlab.trace.store import Row
from shardlab.vocabulary import WHOLE_MODEL, Phase, SpanKind


@dataclass(slots=True)
class Span:
    """A unit at work, in marks of the clock."""

    unit: str
    kind: SpanKind
    begin: Mark
    end: Mark | None = None


def collective_row(event: CollectiveEvent, phase: Phase, seq: int, axis: TimeAxis) -> Row:
    """The row of one collective; on a stream its device times, else those of the lane."""
    start_us, end_us = axis.host_us(event.start_ns), axis.host_us(event.end_ns)
    if event.device_times is not None:
        start_us, end_us = (axis.mark_us(mark) for mark in event.device_times)
    return {
        "seq": seq, "axis": event.axis, "op": event.op, "tag": event.tag, "phase": phase, "dtype": event.dtype,
        "numel": event.numel, "bytes": event.num_bytes, "wire_bytes": event.wire_bytes,
        "group_size": event.group_size, "transport": event.transport, "issue_us": axis.host_us(event.issue_ns),
        "start_us": start_us, "end_us": end_us,
        "wait_start_us": axis.host_us(event.wait_start_ns), "wait_end_us": axis.host_us(event.wait_end_ns),
    }  # fmt: skip


def span_rows(spans: Iterable[Span], collectives: Iterable[Row], axis: TimeAxis) -> list[Row]:
    """The spans without the times in them when the rank only waited for a collective: one row for each piece."""
    # A collective that nobody waited for has NaN there, which is not above anything.
    waits = merged(
        (row["wait_start_us"], row["wait_end_us"]) for row in collectives if row["wait_end_us"] > row["wait_start_us"]
    )
    return [
        {"unit": span.unit, "kind": span.kind, "start_us": start, "end_us": end}
        for span in spans
        for start, end in without(_bounds(span, axis), waits)
    ]


def traffic(collectives: Sequence[Row], spans: Iterable[Row]) -> Row:
    """The columns of table ``steps`` that tell of communication; that of the report itself is left out."""
    own = [row for row in collectives if row["phase"] != Phase.METRICS]
    compute = [row for row in spans if row["unit"] == WHOLE_MODEL and row["kind"] in COMPUTE_KINDS]
    exposed, overlap = exposure(map(_interval, own), map(_interval, compute))
    return {
        "exposed_comm_us": exposed,
        "overlap": overlap,
        "wire_bytes": sum(float(row["wire_bytes"]) for row in own),
    }


def memory_rows(
    where: str, held: ByRole, time_us: float, phase: Phase, resident_bytes: int | None, allocator: Allocator
) -> list[Row]:
    """One row a role; the allocator's and the process' figures stand beside each."""
    common = {
        "time_us": time_us, "phase": phase, "where": where, "resident_bytes": resident_bytes, **asdict(allocator),
    }  # fmt: skip
    return [{**common, "role": role, "bytes": num_bytes} for role, num_bytes in allocator.complete(held).items()]


def unit_place(unit: str) -> str:
    """``where`` of a sample taken in a unit; a module that is called 'rest' or 'peak' must not read as one."""
    return f"module {unit}" if unit in WHOLE_STEP else unit


def _bounds(span: Span, axis: TimeAxis) -> Interval:
    assert span.end is not None
    return axis.mark_us(span.begin), axis.mark_us(span.end)


def _interval(row: Row) -> Interval:
    return row["start_us"], row["end_us"]
