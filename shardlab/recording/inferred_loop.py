"""The training loop of a script, inferred from what it calls: forward, backward, ``optimizer.step()``.

    ... | forward | loss | backward | clipping | optimizer step | data, logging, evaluation | forward | ...
        `---------------- one step ---------------------------'`-------- next step ------------------

A step ends with ``optimizer.step()``. Several optimizers that step one after another end one step together; that is
known only when the next forward (or backward) comes, so a step is written then. Several backwards before it are
gradient accumulation. If a GradScaler skips the optimizer, the step ends with ``scaler.update()``.
The next step begins where the last has ended, so fetching data and logging count; an evaluation in between does not,
nor what follows it: then the step begins with its forward, and so it does after a step whose memory was read. An
evaluation is a forward, without gradients, of a module that trains. Collectives between two steps have the phase
'metrics' if there was an evaluation, else 'data'; those between backward and the optimizer 'clip', except what one rank
sends to another: that is 'backward'.

What a DataLoader takes to give a batch is a span of data, of the step that trains on it.

The loss of a step is the sum of the scalars on this rank whose backward was called: what was differentiated. The norm
of its gradients is known where the script clips them by torch, once, and not as DTensors, whose norm no rank has alone.

Collectives, spans and phases are recorded in watched steps only; loss, learning rate and time in all of them. What is
sent between two steps belongs to the second, so watching begins when the step before a watched one has ended.
"""

import contextlib
from collections.abc import Iterator
from math import nan
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor

from shardlab.comm import CollectiveEvent
from shardlab.comm.trees import tensors_in
from shardlab.recording.torch_callers import POINT_TO_POINT, Moment
from shardlab.trace.clock import Clock, Mark
from shardlab.trace.recorder import BEFORE_TRAINING, Recorder
from shardlab.vocabulary import WHOLE_MODEL, Phase, SpanKind


class Record(Protocol):
    """The record that a loop belongs to."""

    def open(self) -> tuple[Recorder, Clock]:
        """Called at the first step, when it is known on which device the script computes."""

    def traces(self, step: int) -> bool:
        """Whether the memory of a step is traced."""

    def may_trace(self) -> bool:
        """Whether the memory of a step may be traced that is unlike all that were."""

    def reads(self, step: int) -> bool:
        """Whether what is held after a step is read, which takes so long that the next step begins anew."""

    def watches(self, step: int) -> bool:
        """Whether a step's collectives and units are recorded."""

    def watch(self, *, on: bool) -> None:
        """Listen to collectives and units from now on, or no longer."""

    def end_waits(self) -> None:
        """C++ code of torch has waited for collectives."""

    def forget_ended(self) -> None:
        """A step has been written."""


class Loop:
    """Turns the calls of a script into steps, phases and spans of a recorder.

    Args:
        record: that it belongs to.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._is_open = False
        self._is_watched = True  # what comes before the first step is
        self._recorder: Recorder  # from the first step on
        self._clock: Clock
        self.num_steps = 0
        """Steps that were written."""
        self.step = BEFORE_TRAINING
        """The step that runs or has ended last; -1 before the first."""
        self._in_step = contextlib.ExitStack()
        self._in_phase = contextlib.ExitStack()
        self._phase = Phase.SETUP
        self._stepped = False
        self._since: Mark | None = None
        self._losses: list[Tensor] = []
        self._norms: list[list[Tensor]] = []  # of each clipping
        self._learning_rate = nan
        self._late: list[tuple[CollectiveEvent, Phase]] = []
        self._num_backwards = 0  # of this step
        self._fetched: list[tuple[Mark, Mark]] = []  # since the last step has ended
        self._is_fetching, self._thread = False, 0
        self._called: set[int] = set()  # models, since the last backward
        self._models: frozenset[int] = frozenset()

    @property
    def moment(self) -> Moment:
        """The step that runs or has ended last, and the backward in it."""
        return Moment(self.step, self._num_backwards, self._models)

    @contextlib.contextmanager
    def forward(self, root: object, given: Any) -> Iterator[None]:
        """The forward of ``root``, a module that trains, under gradients; ``given`` holds its tensors."""
        # After another forward the graph is alive, which only C++ refers to.
        is_first = self._phase is not Phase.FORWARD
        self._begin()
        self._called.add(id(root))
        self._recorder.called(id(root), tensors_in(given), can_trace=is_first and self._record.may_trace())
        self._enter(Phase.FORWARD, SpanKind.FORWARD)
        try:
            yield
        finally:
            self._record.end_waits()
            self._enter(Phase.FORWARD)
            # The loss, if a backward follows; otherwise the next forward begins this span anew.
            self.begin_span(WHOLE_MODEL, SpanKind.FORWARD)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """A forward without gradients of a module that trains."""
        before = self._phase
        self._enter(Phase.METRICS)
        try:
            yield
        finally:
            self._record.end_waits()
            if not self._stepped:  # before training, or inside a step
                self._enter(before)
            else:  # what follows gathers its results, until the next step begins
                self._since = None
                self._late = [(event, Phase.METRICS) for event, _ in self._late]

    @contextlib.contextmanager
    def fetch(self) -> Iterator[None]:
        """A loader gives a batch, or begins to."""
        # One loader may use another, also in a thread that loads ahead, for which nobody waits here.
        if self._is_fetching or not self._is_open or get_ident() != self._thread:
            yield
            return
        self._is_fetching, before = True, self._recorder.mark()
        self.end_span(WHOLE_MODEL, SpanKind.FORWARD)  # of the loss, if the next batch is fetched before backward
        try:
            yield
        finally:
            self._is_fetching = False
            self._fetched.append((before, self._recorder.mark()))
            if not self._stepped:
                self._pass_late()
            if self._phase is Phase.FORWARD:
                self.begin_span(WHOLE_MODEL, SpanKind.FORWARD)

    @contextlib.contextmanager
    def backward(self, losses: list[Tensor]) -> Iterator[None]:
        """A backward of ``losses``, one number each."""
        self._begin()
        self._losses += losses
        self._num_backwards += 1
        # A second backward of one forward is of the same models.
        self._models, self._called = frozenset(self._called) or self._models, set()
        self.end_span(WHOLE_MODEL, SpanKind.FORWARD)
        self._enter(Phase.BACKWARD, SpanKind.BACKWARD)
        try:
            yield
        finally:
            self._record.end_waits()
            self._enter(Phase.CLIP)

    def clipped(self, norm: list[Tensor]) -> None:
        """Gradients are clipped by their ``norm``, one number; none if it is not known on this rank."""
        self._norms.append(norm)

    def optimizer_begins(self, optimizer: object, learning_rate: float, *, trains: bool) -> None:
        """The outermost ``optimizer.step()`` is called; it ``trains`` if it was given a closure, as LBFGS is."""
        if self._stepped and trains:
            self._begin()
        elif self._stepped:  # one optimizer of several: the step goes on
            self._stepped = False
            self._pass_late()
        self._learning_rate = learning_rate
        if self.step != BEFORE_TRAINING:
            self._recorder.called(id(optimizer), (), can_trace=False)  # a GAN's halves may begin alike
        self._enter(Phase.STEP, SpanKind.OPTIMIZER)

    def optimizer_ends(self) -> None:
        """It has returned."""
        self._enter(Phase.DATA)
        if self.step == BEFORE_TRAINING:  # an optimizer that steps before any forward or backward
            return
        self._since = self._recorder.at_rest()
        self._in_step.close()
        if self._recorder.traces:  # it has read all memory, which takes so long that the next step begins anew
            self._since = None
        self._stepped = True
        if not self._is_watched and self._record.watches(self.step + 1):
            self._record.watch(on=True)
            self._since = self._clock.mark()  # what that took belongs to no step

    def scaler_updated(self) -> None:
        """A GradScaler has ended its step; if no optimizer stepped since the backward, it has skipped it."""
        if self._phase is Phase.CLIP:
            self.optimizer_ends()

    def issued(self, event: CollectiveEvent) -> None:
        """Record a collective: in this step, or in the next if this one has ended."""
        if self._stepped or not self._is_open:
            self._late.append((event, self._phase))
        elif self._is_watched:
            # Between two backwards stages of a pipeline send to each other; no norm is found in that way.
            in_pipeline = self._phase is Phase.CLIP and event.op in POINT_TO_POINT
            with self._recorder.phase(Phase.BACKWARD if in_pipeline else self._phase):
                self._recorder.issued(event)

    def begin_span(self, unit: str, kind: SpanKind) -> None:
        """A unit starts to compute; it is recorded while the module trains."""
        if self._is_watched and self._phase in (Phase.FORWARD, Phase.BACKWARD):
            self._recorder.begin_span(unit, kind)

    def end_span(self, unit: str, kind: SpanKind) -> None:
        """A unit has ended."""
        if self._is_watched and self._phase in (Phase.FORWARD, Phase.BACKWARD):
            self._recorder.end_span(unit, kind)

    def spent(self, since_ns: int) -> None:
        """Count the time from ``since_ns`` until now as time spent recording."""
        if self._is_open:
            self._recorder.spent(since_ns)

    def finish(self) -> None:
        """Write the last step, if it has ended."""
        self._in_phase.close()
        # A step that has not ended is not written: its block is only left.
        if self._stepped:
            self._cut()
        self._in_step.close()

    def _begin(self) -> None:
        """Begin the next step if the last one has ended, or the first."""
        if self._stepped:
            self._cut()
        elif self.step != BEFORE_TRAINING:
            return
        self._in_phase.close()
        if not self._is_open:
            self._recorder, self._clock = self._record.open()
            self._is_open = True
            self._pass_late()  # what came before training
        since, self._thread = None if self._record.reads(self.step) else self._since, get_ident()
        if since is None:  # what was fetched before its forward is no part of the step
            self._fetched.clear()
        self.step += 1
        self._num_backwards = 0
        traces, self._is_watched = self._record.traces(self.step), self._record.watches(self.step)
        if not self._is_watched:  # only now: the step before went on as long as another optimizer could follow
            self._record.watch(on=False)
        self._in_step.enter_context(
            self._recorder.step(self.step, trace_memory=traces, since=since, watched=self._is_watched)
        )
        self._pass_late()

    def _pass_late(self) -> None:
        for event, phase in self._late if self._is_watched else ():
            with self._recorder.phase(phase):
                self._recorder.issued(event)
        for times in self._fetched if self._is_watched else ():
            self._recorder.add_span(WHOLE_MODEL, SpanKind.DATA, *times)
        self._late.clear()
        self._fetched.clear()

    def _cut(self) -> None:
        losses, norms, self._losses, self._norms, self._stepped = self._losses, self._norms, [], [], False
        # Read them only here, where the recorder waits for the device anyway: any earlier read would add a wait.
        loss = sum(float(loss) for loss in losses) if losses else nan
        norm = float(norms[0][0]) if len(norms) == 1 and norms[0] else nan
        self._recorder.finish_step(loss, norm, self._learning_rate, None)
        # Forget collectives only after the step is written: until then, a wait can still change what is written.
        self._record.forget_ended()
        self.num_steps += 1

    def _enter(self, phase: Phase, kind: SpanKind | None = None) -> None:
        self._in_phase.close()
        self._phase = phase
        if self._is_open and (self._is_watched or self._recorder.traces):
            self._in_phase.enter_context(self._recorder.phase(phase, kind if self._is_watched else None))


def scalars(tensors: object) -> list[Tensor]:
    """Copies of the one-element tensors that backward is called on; not of subclasses, whose reads may communicate."""
    given = tensors if isinstance(tensors, list | tuple) else [tensors]
    # Copies, since scripts go on to average their loss over the ranks in place.
    return [tensor.detach().clone() for tensor in given if type(tensor) is torch.Tensor and tensor.numel() == 1]
