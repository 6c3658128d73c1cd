"""The recorder of one rank: it observes a step and writes its entry when the step is over.

It observes the communicators, the units of the module and the phases of the training step. Nothing it does changes a
number or synchronises a stream inside a step. It adds up all the time it takes itself, for the manifest. What is
communicated before the first step (parameters from rank 0) is recorded as step -1.

It reads the CPU time of the computing thread (``clock.CpuReadings``) whenever it marks a time, and whenever a
collective begins or ends, from the thread that reports this. So it is known how long the rank was off the CPU between
two readings, and no such interval overlaps a collective only in part.

Steps are written in their order, each as soon as the collectives that it sent have ended. A collective may travel while
the next steps compute. Its row belongs to the step that sent it, and has its true end. In each later step its times
stand beside the tables, for that step's exposed communication and waits.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan
from time import perf_counter_ns

import torch
from torch import Tensor

from shardlab.comm import CollectiveEvent, Observer
from shardlab.records.entries import CARRIED, CPU, Columns
from shardlab.records.store import RunWriter
from shardlab.records.tables import COLLECTIVES, MEMORY, SHARDS, SPANS, STEPS
from shardlab.trace import observed
from shardlab.trace.clock import Clock, CpuReadings, Mark, least_operation_ns
from shardlab.trace.memory_by_role import LiveTensors, MemoryLedger, on_device
from shardlab.trace.observed import Row, Span
from shardlab.trace.process_memory import MemorySamples
from shardlab.trace.unlike_steps import UnlikeSteps
from shardlab.vocabulary import WHOLE_MODEL, Phase, Role, SpanKind

BEFORE_TRAINING = -1
# What is held at rest settles in the first steps (optimizer state appears in step 0). Reading it touches every tensor,
# the most expensive part of recording, so later it is read at every sixteenth step: the same steps on every rank.
ALWAYS_AT_REST = 2
EVERY_AT_REST = 16
MOST_HELD = 16  # steps
Sent = Sequence[tuple[CollectiveEvent, Phase]]


def sampled_at_rest(step: int) -> bool:
    """Whether what is held after a step is read."""
    return step < ALWAYS_AT_REST or step % EVERY_AT_REST == 0


class Recorder(Observer):
    """Turns what happens on one rank into entries of its stream.

        recorder = Recorder(writer, clock, origin_ns, device=device)
        with mesh.observed_by(recorder):
            engine = build_engine(...)                      # its broadcast is step -1
            recorder.live_tensors = engine.live_tensors
            with recorder.step(0):
                ...
            recorder.finish_step(loss, grad_norm, learning_rate, num_tokens)

    Args:
        writer: takes the entries.
        clock: of the compute.
        origin_ns: ``time.perf_counter_ns`` at the start of the run, the same on all ranks of a host.
        device: of the compute; on CUDA peaks are the allocator's, and what it holds beside tensors is recorded too.
        samples: takes the number of a step, and returns whether memory is read after it; the same on every rank.
    """

    def __init__(
        self, writer: RunWriter, clock: Clock, origin_ns: int, *, device: torch.device,
        samples: Callable[[int], bool] = sampled_at_rest,
    ) -> None:  # fmt: skip
        self.live_tensors: Callable[[], LiveTensors] = dict
        """The engine's tensors by role, asked at the end of a step; in host memory all others are unattributed."""
        self._writer, self._clock, self._origin_ns = writer, clock, origin_ns
        self._device, self._samples = device, samples
        self._memory = MemorySamples(device, origin_ns)
        self._phase = Phase.SETUP
        self._step = self._first_step = BEFORE_TRAINING
        self._steps = _HeldSteps(writer, clock, origin_ns)
        self._events: list[tuple[CollectiveEvent, Phase]] = []
        self._spans: list[Span] = []
        self._open: dict[tuple[str, SpanKind], tuple[SpanKind, Mark]] = {}
        self._ledger: MemoryLedger | None = None
        self._tracing = contextlib.ExitStack()  # holds the ledger, or that of the data
        self._of_data: MemoryLedger | None = None
        self._reads = False
        self._unlike = UnlikeSteps()
        self._cpu = CpuReadings(None)
        self._watched = True
        self._begin: Mark = 0
        self._end: Mark | None = None
        self._cost_ns = 0
        self._costs_ns = {True: [0, 0], False: [0, 0]}  # by whether a step was watched: of recording and of the steps

    @contextlib.contextmanager
    def step(
        self, step: int, *, trace_memory: bool = False, since: Mark | None = None, watched: bool = True
    ) -> Iterator[None]:
        """One training step.

        Args:
            step: its number.
            trace_memory: find its peak by role, which slows it; on CUDA the allocator knows every step's peak, but not
                the roles. For other steps see ``called``.
            since: when it began; None for now.
            watched: whether its collectives and units are recorded; if not, what the step sent and hid is unknown.
        """
        if self._step == BEFORE_TRAINING:
            # Before the lists begin anew: what has been sent so far is a step of its own.
            self._clock.settle()
            self._steps.add(BEFORE_TRAINING, self._events, {}, inf)
            self._first_step = step
        began_ns = perf_counter_ns()
        self._step, self._spans, self._events, self._cost_ns = step, [], [], 0
        self._watched, self._reads = watched, trace_memory or self._samples(step)
        self._unlike.begin(step)
        self._ledger, self._of_data, self._watches = None, None, False
        if trace_memory:
            self._unlike.forget_traced()
            self._trace()
        self._memory.begin_step()
        # What was read since the last step ended is of this one. (Where marks are events there are no readings.)
        earlier = self._cpu.between(since, began_ns) if isinstance(since, int) else []
        self._cpu = CpuReadings(self._clock.cpu_time() if watched else None, earlier)
        self.spent(began_ns)
        # After the recorder's own preparations, which are no part of the step.
        begin = self.mark()
        self._begin, self._end = begin if since is None else since, None
        try:
            with self._tracing:
                yield
        except BaseException:
            self._cpu.stop()  # the thread may end now, before collectives do that are under way
            raise
        finally:
            # Without a call of ``at_rest()``, after an error for example, the step lasts until here.
            if self._end is None:
                self._end = self.mark()
            self._open.clear()

    def look_at_data(self) -> None:
        """Until ``called``, watch what data are made of: if the step is traced from then on, that is held in it."""
        if self._ledger is None and self._device.type != "cuda" and not compiles():
            self._watch()

    def called(self, what: Hashable, given: Iterable[Tensor], held: Iterable[Tensor] = (), *, can_trace: bool) -> None:
        """Note a call of the step, and trace memory from here on if the step is unlike all that were traced.

        On CUDA the allocator knows every peak, so nothing is traced for this; nor where torch.compile was asked for,
        which never compiles what it meets while operations are watched.

        Args:
            what: is called.
            given: its tensors.
            held: tensors that the step has made and that neither its data nor ``live_tensors`` have.
            can_trace: whether nothing else of the step is alive.
        """
        if self._device.type == "cuda":
            return
        began_ns = perf_counter_ns()
        if self._unlike.add(what, given) and can_trace and self._ledger is None and not compiles():
            self._unlike.trace()
            self._trace(held)
        elif self._of_data is not None:
            self._tracing.close()
            self._watches = False
            self._of_data.resume()
        self.spent(began_ns)

    @property
    def traces(self) -> bool:
        """Whether the memory of this step is traced."""
        return self._ledger is not None

    def _watch(self) -> None:
        # Of a step whose batches are all read before the first is used, this is asked for each of them.
        if not self._watches:
            self._of_data = self._tracing.enter_context(self._of_data or MemoryLedger({}, self._device.type))
            self._watches = True

    def _trace(self, held: Iterable[Tensor] = ()) -> None:
        self._watch()
        assert self._of_data is not None
        live = self._live()
        self._of_data.hold({**live, Role.OTHER: [*live.get(Role.OTHER, ()), *held]})
        self._ledger, self._of_data = self._of_data, None

    @contextlib.contextmanager
    def phase(self, phase: Phase, kind: SpanKind | None = None, unit: str = "") -> Iterator[None]:
        """A phase of the step; with ``kind`` it is also a span of the whole model, and of a ``unit`` inside it."""
        began_ns = perf_counter_ns()
        before, self._phase = self._phase, phase
        if self._ledger is not None:
            self._ledger.phase = phase
        if kind is not None:
            self.begin_span(WHOLE_MODEL, kind)
        if kind is not None and unit:
            self.begin_span(unit, kind)
        self.spent(began_ns)
        try:
            yield
        finally:
            began_ns = perf_counter_ns()
            if kind is not None:
                self.end_span(unit, kind)
                self.end_span(WHOLE_MODEL, kind)
                # For a unit whose input needs no gradient, backward never ended.
                self._open.clear()
                self._tell_ledger()
            self._phase = before
            self.spent(began_ns)

    def begin_span(self, unit: str, kind: SpanKind) -> None:
        """A unit starts to compute; forward inside of backward is recomputation."""
        recomputes = kind is SpanKind.FORWARD and self._phase is Phase.BACKWARD
        self._open[unit, kind] = (SpanKind.RECOMPUTE if recomputes else kind, self.mark(always=False))
        self._tell_ledger()

    def end_span(self, unit: str, kind: SpanKind) -> None:
        """A unit has ended; ignored if it never began."""
        if (begun := self._open.pop((unit, kind), None)) is not None:
            self._spans.append((unit, *begun, self.mark(always=False)))
            self._tell_ledger()

    def add_span(self, unit: str, kind: SpanKind, begin: Mark, end: Mark) -> None:
        """A unit was at work between two marks; also before the running step was entered, see ``step``."""
        self._spans.append((unit, kind, begin, end))

    def mark(self, *, always: bool = True) -> Mark:
        """Mark the time and read the CPU time; unless ``always``, the reading is skipped if the last one is recent."""
        self._cpu.read(always=always)
        return self._clock.mark()

    def spent(self, since_ns: int) -> None:
        """Count the time from ``since_ns`` until now as time spent recording."""
        self._cost_ns += perf_counter_ns() - since_ns

    def at_rest(self) -> Mark:
        """The optimizer has stepped: stop the step's clock, and sample what is held before gradients are forgotten.

        If it is called again, for another optimizer of the same step, the later time and sample count.

        Returns:
            When the clock was stopped.
        """
        self._end = self.mark()
        began_ns = perf_counter_ns()
        if self._ledger is not None or self._reads:
            live = self._live()
            # Now, while gradients are still held: afterwards nobody knows what their storages were.
            if self._ledger is not None:
                self._ledger.classify(live)
            if self._reads:  # the same steps on every rank
                self._memory.at_rest(live, began_ns, self._phase)
        self.spent(began_ns)
        return self._end

    def issued(self, event: CollectiveEvent) -> None:
        """Remember the event, with the phase it was issued in."""
        began_ns = perf_counter_ns()
        self._cpu.read()
        self._events.append((event, self._phase))
        if self._ledger is not None:
            self._ledger.issued(event)
        self.spent(began_ns)

    def started(self, event: CollectiveEvent) -> None:
        """Note the transport's scratch memory."""
        self._cpu.read()
        if self._ledger is not None:
            self._ledger.started(event)

    def completed(self, event: CollectiveEvent) -> None:
        """Note that the transport's scratch memory is free."""
        self._cpu.read()
        if self._ledger is not None:
            self._ledger.completed(event)

    def waited(self, event: CollectiveEvent) -> None:
        """Its times are in the event."""
        began_ns = perf_counter_ns()
        self._cpu.read()
        self.spent(began_ns)

    def finish_step(self, loss: float, grad_norm: float, learning_rate: float, num_tokens: int | None) -> None:
        """Write the step that has ended in one append: a killed run has a step whole or not at all."""
        began_ns = perf_counter_ns()
        # The step is over, so waiting for the device here disturbs nothing that was measured.
        self._clock.settle()
        assert self._end is not None
        begin_ns, end_ns = self._clock.resolve((self._begin, self._end))
        # Before the tables: asking for the peak adds its rows to those of the memory.
        step: Row = {
            "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
            "start_ns": begin_ns - self._origin_ns, "step_ns": end_ns - begin_ns,
            "peak_bytes": self._memory.peak(self._ledger), "num_tokens": num_tokens,
            "traced_memory": self._ledger is not None, "unlike_step": self._unlike.end(traced=self._ledger is not None),
            "watched": self._watched, "dispatch_ns": self._dispatch_ns(),
        }  # fmt: skip
        tables = {
            SPANS.name: observed.span_columns(self._spans, self._clock, self._origin_ns),
            CARRIED: self._steps.carried(end_ns),
            CPU: observed.cpu_columns(self._cpu.between(begin_ns, end_ns), self._origin_ns),
            MEMORY.name: observed.columns_of(self._memory.rows),
            STEPS.name: observed.columns_of([step]),
        }
        self._cpu.stop()
        self._steps.add(self._step, self._events, tables, end_ns)
        self.spent(began_ns)
        if self._ledger is None and self._step > self._first_step:
            of_recording_and_of_steps = self._costs_ns[self._watched]
            of_recording_and_of_steps[0] += self._cost_ns
            of_recording_and_of_steps[1] += end_ns - begin_ns
        self._ledger = None

    @property
    def cost_share(self) -> float:
        """Time spent recording over the time of the steps; NaN where none counts.

        Left out as in all timings: the first step, which allocates and warms up, and memory-traced steps.
        """
        return _share(*map(sum, zip(*self._costs_ns.values(), strict=True)))

    @property
    def unwatched_cost_share(self) -> float:
        """The same of the steps that were not watched, which are most of a long run."""
        return _share(*self._costs_ns[False])

    def write_shards(self, rows: list[Row]) -> None:
        """Write table ``shards``: who holds which slice."""
        self._writer.append(self._step, {SHARDS.name: observed.columns_of(rows)})

    def _dispatch_ns(self) -> float:
        if self._ledger is None or self._device.type != "cpu":  # on a stream the host's time is beside the compute's
            return nan
        return self._ledger.num_operations * least_operation_ns()

    def _live(self) -> LiveTensors:
        live = self.live_tensors()
        return on_device(live, "cuda") if self._device.type == "cuda" else live

    def _tell_ledger(self) -> None:
        """Tell it the current unit: the one that began last and has not ended."""
        if self._ledger is not None:
            self._ledger.unit = next(reversed(self._open), (WHOLE_MODEL, None))[0]


def compiles() -> bool:
    """Whether torch.compile was asked for anything."""
    # Private: torch counts in public only what it has compiled, and here it may be about to.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(map(callable, dynamo.cached_backends.values()))


def _share(cost: int, steps: int) -> float:
    return cost / steps if steps else nan


class _HeldSteps:
    """The steps of one rank that have ended and are not all written.

    Args:
        writer: takes the entries; when it closes, all are written.
        clock: of the compute, settled when a step is added.
        origin_ns: from where times count.
    """

    def __init__(self, writer: RunWriter, clock: Clock, origin_ns: int) -> None:
        self._writer, self._clock, self._origin_ns = writer, clock, origin_ns
        self._held: deque[tuple[int, Sent, Mapping[str, Columns]]] = deque()
        self._carried: list[CollectiveEvent] = []  # of earlier steps, which had not ended when the last step did
        self._seq = 0
        writer.before_close = partial(self._write, at_most=0)

    def carried(self, end_ns: int) -> Columns:
        """What earlier steps sent and was under way in one that ended at ``end_ns``."""
        return observed.carried_columns(self._carried, end_ns, self._origin_ns)

    def add(self, step: int, sent: Sent, tables: Mapping[str, Columns], end_ns: float) -> None:
        """Write a step, now or later.

        Args:
            step: its number.
            sent: its collectives, with the phase in which each was issued.
            tables: the others.
            end_ns: when it ended.
        """
        self._held.append((step, sent, tables))
        # One that never ends must not keep the steps after it from the disk for ever.
        self._write(at_most=MOST_HELD)
        trained = (event for event, phase in sent if phase is not Phase.METRICS)
        self._carried = [event for event in (*self._carried, *trained) if not event.end_ns <= end_ns]  # NaN too

    def _write(self, at_most: int) -> None:
        while self._held and (len(self._held) > at_most or all(_has_ended(event) for event, _ in self._held[0][1])):
            step, sent, tables = self._held.popleft()
            now_ns = perf_counter_ns()
            # Copies: whoever follows an event that has not ended sets its times later.
            known = [(event if _has_ended(event) else _until(event, now_ns), phase) for event, phase in sent]
            collectives = observed.collective_columns(known, self._seq, self._clock, self._origin_ns)
            self._seq += len(sent)
            self._writer.append(step, {COLLECTIVES.name: collectives, **tables})


def _has_ended(event: CollectiveEvent) -> bool:
    # On a stream all have ended once the clock has settled.
    return event.device_times is not None or not isnan(event.end_ns)


def _until(event: CollectiveEvent, now_ns: int) -> CollectiveEvent:
    """A copy of one that has not ended, or not even begun: it lasts until now."""
    return replace(event, start_ns=now_ns if isnan(event.start_ns) else event.start_ns, end_ns=now_ns)
