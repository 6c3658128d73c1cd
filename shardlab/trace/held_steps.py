"""Writes the steps of a rank in their order, each as soon as the collectives that it sent have ended.

A collective may travel while the next steps compute. Its row belongs to the step that sent it, and has its true end.
In each later step its times stand beside the tables, for that step's exposed communication and waits.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from time import perf_counter_ns

from shardlab.comm import CollectiveEvent
from shardlab.tables import COLLECTIVES
from shardlab.trace.clock import Clock
from shardlab.trace.entries import Columns
from shardlab.trace.observed import carried_columns, collective_columns
from shardlab.trace.store import RunWriter
from shardlab.vocabulary import Phase

MOST_HELD = 16
Sent = Sequence[tuple[CollectiveEvent, Phase]]


class HeldSteps:
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
        return carried_columns(self._carried, end_ns, self._origin_ns)

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
            self._writer.append(step, {COLLECTIVES.name: self._collectives(sent), **tables})

    def _collectives(self, sent: Sent) -> Columns:
        first, now_ns = self._seq, perf_counter_ns()
        self._seq += len(sent)
        # Copies: whoever follows an event that has not ended sets its times later.
        known = [(event if _has_ended(event) else _until(event, now_ns), phase) for event, phase in sent]
        return collective_columns(known, first, self._clock, self._origin_ns)


def _has_ended(event: CollectiveEvent) -> bool:
    # On a stream all have ended once the clock has settled.
    return event.device_times is not None or not isnan(event.end_ns)


def _until(event: CollectiveEvent, now_ns: int) -> CollectiveEvent:
    """A copy of one that has not ended, or not even begun: it lasts until now."""
    return replace(event, start_ns=now_ns if isnan(event.start_ns) else event.start_ns, end_ns=now_ns)
