"""The recorder of one rank: it listens, and writes table rows when a step is over.

It observes the communicators, the units of the module and the phases of the training step. Nothing it does changes a
number or synchronises a stream inside a step. It adds up the time it takes itself, for the manifest.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isnan, nan
from time import perf_counter_ns

import psutil
import torch

from shardlab.analysis.intervals import intersect, subtract, total
from shardlab.comm import CollectiveEvent
from shardlab.tables import COLLECTIVES, MEMORY, SHARDS, SPANS, STEPS
from shardlab.trace.clock import Clock, Mark
from shardlab.trace.memory import LiveTensors, MemoryLedger, bytes_by_role
from shardlab.trace.store import Row, RunWriter
from shardlab.vocabulary import Phase, Role, SpanKind

WHOLE_MODEL = "model"


@dataclass
class _Span:
    unit: str
    kind: SpanKind
    begin: Mark
    end: Mark | None = None


class Recorder:
    """Turns what happens on one rank into rows.

    Args:
        writer: takes the rows.
        run: name of the run.
        rank: global rank.
        clock: of the compute.
        origin_ns: ``time.perf_counter_ns`` at the start of the run, the same on all ranks.
        device: of the compute; on CUDA peaks are the allocator's.
        emulated: whether a link is emulated, which every row says.
        live_tensors: the engine's tensors by role, asked at the end of a step.
    """

    def __init__(
        self,
        writer: RunWriter,
        run: str,
        rank: int,
        clock: Clock,
        origin_ns: int,
        *,
        device: torch.device,
        emulated: bool,
        live_tensors: Callable[[], LiveTensors],
    ) -> None:
        self._writer, self._clock, self._origin_ns = writer, clock, origin_ns
        self._keys: Row = {"run": run, "source": "emulated" if emulated else "measured", "rank": rank}
        self._live_tensors = live_tensors
        self._on_cuda = device.type == "cuda"
        self._phase = Phase.SETUP
        self._step = -1
        self._seq = 0
        self._events: list[tuple[CollectiveEvent, Phase]] = []
        self._spans: list[_Span] = []
        self._open: dict[tuple[str, SpanKind], _Span] = {}
        self._memory: list[Row] = []
        self._ledger: MemoryLedger | None = None
        self._process = psutil.Process()
        self._begin: Mark = 0.0
        self._end: Mark | None = None
        self._cost_ns = 0
        self._cost_share_ns = [0, 0]  # recording and steps, over the steps that count

    @contextlib.contextmanager
    def step(self, step: int, *, trace_memory: bool = False) -> Iterator[None]:
        """One training step.

        Args:
            step: its number.
            trace_memory: find its exact peak by role, which slows it; on CUDA the allocator knows every step's peak.
        """
        self._step, self._spans, self._memory, self._events, self._cost_ns = step, [], [], [], 0
        self._ledger = MemoryLedger(self._live_tensors()) if trace_memory and not self._on_cuda else None
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._begin, self._end = self._clock.mark(), None
        try:
            with self._ledger or contextlib.nullcontext():
                yield
        finally:
            if self._end is None:
                self._end = self._clock.mark()
            self._open.clear()

    @contextlib.contextmanager
    def phase(self, phase: Phase, kind: SpanKind | None = None) -> Iterator[None]:
        """A phase of the step; with ``kind`` it is also a span of the whole model."""
        before, self._phase = self._phase, phase
        if self._ledger is not None:
            self._ledger.phase = phase
        if kind is not None:
            self.begin_span(WHOLE_MODEL, kind)
        try:
            yield
        finally:
            if kind is not None:
                self.end_span(WHOLE_MODEL, kind)
            self._phase = before

    def begin_span(self, unit: str, kind: SpanKind) -> None:
        """A unit starts to compute."""
        began = perf_counter_ns()
        self._open[unit, kind] = _Span(unit, kind, self._clock.mark())
        self._cost_ns += perf_counter_ns() - began

    def end_span(self, unit: str, kind: SpanKind) -> None:
        """A unit has ended; without a beginning, nothing."""
        began = perf_counter_ns()
        if (span := self._open.pop((unit, kind), None)) is not None:
            span.end = self._clock.mark()
            self._spans.append(span)
        self._cost_ns += perf_counter_ns() - began

    def at_rest(self) -> None:
        """The optimizer has stepped: stop the step's clock, and sample what is held before gradients are forgotten."""
        self._end = self._clock.mark()
        began = perf_counter_ns()
        live = self._live_tensors()
        if self._ledger is not None:
            self._ledger.classify(live)
        self._sample("rest", bytes_by_role(live), began)
        self._cost_ns += perf_counter_ns() - began

    def issued(self, event: CollectiveEvent) -> None:
        """Remember it, with the phase it was issued in."""
        began = perf_counter_ns()
        self._events.append((event, self._phase))
        self._cost_ns += perf_counter_ns() - began

    def started(self, event: CollectiveEvent) -> None:
        """The transport took its scratch."""
        if self._ledger is not None:
            self._ledger.started(event)

    def completed(self, event: CollectiveEvent) -> None:
        """The transport gave its scratch back."""
        if self._ledger is not None:
            self._ledger.completed(event)

    def waited(self, event: CollectiveEvent) -> None:
        """Its times are in the event."""

    def finish_step(self, loss: float, grad_norm: float, learning_rate: float, num_tokens: int) -> None:
        """Write the rows of the step that has ended."""
        began = perf_counter_ns()
        self._clock.settle()
        peak_bytes = self._peak()
        collectives = [self._collective_row(event, phase) for event, phase in self._events]
        waits = [(row["wait_start_us"], row["wait_end_us"]) for row in collectives if not isnan(row["wait_start_us"])]
        spans = [row for span in self._spans for row in self._span_rows(span, waits)]
        in_step = [row for row in collectives if row["phase"] != Phase.METRICS]
        exposed, overlap = _exposure(in_step, [row for row in spans if row["unit"] == WHOLE_MODEL])
        assert self._end is not None
        step_us = self._us(self._end) - self._us(self._begin)
        row: Row = {
            **self._here, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "step_us": step_us,
            "exposed_comm_us": exposed, "overlap": overlap, "peak_bytes": peak_bytes,
            "wire_bytes": sum(float(row["wire_bytes"]) for row in in_step),
            "num_tokens": num_tokens, "traced_memory": self._ledger is not None,
        }  # fmt: skip
        self._write(collectives, spans, row)
        self._cost_ns += perf_counter_ns() - began
        if self._ledger is None:
            self._cost_share_ns[0] += self._cost_ns
            self._cost_share_ns[1] += int(step_us * 1e3)
        self._ledger = None

    @property
    def cost_share(self) -> float:
        """Time spent recording over the time of the steps; memory-traced steps left out. NaN before the first."""
        cost, steps = self._cost_share_ns
        return cost / steps if steps else nan

    def write_shards(self, rows: list[Row]) -> None:
        """Write who holds what."""
        self._writer.append(SHARDS, [{**self._here, **row} for row in rows])

    def _write(self, collectives: list[Row], spans: list[Row], step: Row) -> None:
        self._writer.append(COLLECTIVES, collectives)
        self._writer.append(SPANS, spans)
        self._writer.append(MEMORY, self._memory)
        self._writer.append(STEPS, [step])

    @property
    def _here(self) -> Row:
        return {**self._keys, "step": self._step}

    def _us(self, mark: Mark) -> float:
        return (self._clock.resolve(mark) - self._origin_ns) / 1e3

    def _host_us(self, time_ns: float) -> float:
        return (time_ns - self._origin_ns) / 1e3

    def _peak(self) -> int | None:
        if self._on_cuda:
            return torch.cuda.max_memory_allocated()
        if self._ledger is None:
            return None
        peak = self._ledger.peak()
        self._sample("peak", peak.by_role, peak.time_ns, peak.phase)
        return peak.num_bytes

    def _sample(self, where: str, held: dict[Role, int], time_ns: int, phase: Phase | None = None) -> None:
        resident = self._process.memory_info().rss
        allocated = torch.cuda.memory_allocated() if self._on_cuda else None
        reserved = torch.cuda.memory_reserved() if self._on_cuda else None
        self._memory += [
            {**self._here, "time_us": self._host_us(time_ns), "phase": phase or self._phase, "where": where, "role": role,
             "bytes": num_bytes, "allocated_bytes": allocated, "reserved_bytes": reserved, "resident_bytes": resident}
            for role, num_bytes in held.items()
        ]  # fmt: skip

    def _collective_row(self, event: CollectiveEvent, phase: Phase) -> Row:
        begin, end = event.start_ns, event.end_ns
        if event.device_times is not None:
            begin, end = (self._clock.resolve(mark) for mark in event.device_times)
        self._seq += 1
        return {
            **self._here, "seq": self._seq - 1, "axis": event.axis, "op": event.op, "tag": event.tag, "phase": phase,
            "dtype": event.dtype, "numel": event.numel, "bytes": event.num_bytes, "wire_bytes": event.wire_bytes,
            "group_size": event.group_size, "transport": event.transport, "issue_us": self._host_us(event.issue_ns),
            "start_us": self._host_us(begin), "end_us": self._host_us(end),
            "wait_start_us": self._host_us(event.wait_start_ns), "wait_end_us": self._host_us(event.wait_end_ns),
        }  # fmt: skip

    def _span_rows(self, span: _Span, waits: list[tuple[float, float]]) -> list[Row]:
        """The span without the times in it when the rank only waited for a collective."""
        assert span.end is not None
        computing = subtract([(self._us(span.begin), self._us(span.end))], waits)
        return [
            {**self._here, "unit": span.unit, "kind": span.kind, "start_us": start, "end_us": end}
            for start, end in computing.tolist()
        ]


def _exposure(collectives: list[Row], spans: list[Row]) -> tuple[float, float]:
    """Exposed communication (us) and overlap; NaN without communication."""
    communication = [(row["start_us"], row["end_us"]) for row in collectives]
    compute = [(row["start_us"], row["end_us"]) for row in spans]
    length = total(communication)
    if length == 0:
        return nan, nan
    hidden = total(intersect(communication, compute))
    return length - hidden, hidden / length
