"""One collective under way: what the caller holds and waits for, and the record that observers get of it.

The communicator knows nothing of recorders: it fills in one ``CollectiveEvent`` per call and hands it to observers. A
recorder turns events into table rows; the hang board writes the last one where the parent process can read it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan
from time import perf_counter_ns

import torch
from torch import Tensor

from shardlab.vocabulary import Collective

DeviceEvent = torch.cuda.Event
"""A point in the work of a stream."""

Mark = Callable[[], DeviceEvent]
"""Makes an event, with a time, behind the work that the current stream has now."""


@dataclass(slots=True)
class CollectiveEvent:
    """One collective on one rank; times are nanoseconds of ``time.perf_counter_ns``, NaN until they are known.

    Attributes:
        seq: position among the collectives of this communicator, from 0.
        numel: elements of the whole buffer; ``num_bytes`` likewise.
        own_chunk_bytes: bytes of this rank's chunk, where chunks may be uneven.
        bounds: offsets of all chunks, in elements of the buffer; None where there are none, or others have cut them.
        scratch_bytes: bytes the transport holds between start and end beside the caller's buffers.
        storage: identity of the buffer's storage while it is alive, so that a memory ledger can tell what it is.
        source_line: ``file:line`` of the caller outside the library; empty until an observer asks (``callers.locate``).
        torch_moves: bytes this rank sends where a group of torch's own runs it (``partition.ring_cost``), else None.
        ranks: the global ranks of the group.
        is_letter: whether nobody sees its end before this rank waits for it (``transports.letters``). Only then
            observers are told that it has completed, and before, if it had not come yet, that it has started.
        device_times: events at begin and end, where a stream ran it: whoever records resolves them after the step.
        device_issue: event of the stream that computed, where it came to the issue.
        device_wait: where a stream waited: (its arrival, its going on), or (the collective's start, its arrival, its
            going on). The wait begins at the later of the first ones. The host's own wait says nothing of it.
    """

    seq: int
    op: Collective
    axis: str
    tag: str
    dtype: str
    numel: int
    num_bytes: int
    group_size: int
    transport: str
    emulated: bool
    source_line: str = ""
    own_chunk_bytes: int | None = None
    bounds: tuple[int, ...] | None = None
    scratch_bytes: int = 0
    storage: int = 0
    torch_moves: float | None = None
    ranks: tuple[int, ...] = ()
    is_letter: bool = False
    issue_ns: float = field(default_factory=perf_counter_ns)
    start_ns: float = nan
    end_ns: float = nan
    wait_start_ns: float = nan
    wait_end_ns: float = nan
    device_times: tuple[DeviceEvent, DeviceEvent] | None = None
    device_issue: DeviceEvent | None = None
    device_wait: tuple[DeviceEvent, ...] | None = None

    @property
    def has_ended_on_stream(self) -> bool:
        """Whether the stream that ran it has come to its end; False where no stream did."""
        return self.device_times is not None and self.device_times[1].query()


class Observer:
    """Gets the events. Calls must be short; ``completed``, mostly ``started`` too, come from a queue's thread.

    Whoever inherits from it defines those that it wants to hear of.
    """

    def issued(self, event: CollectiveEvent) -> None:
        """The caller asked for the collective."""

    def started(self, event: CollectiveEvent) -> None:
        """The transport began it."""

    def completed(self, event: CollectiveEvent) -> None:
        """Its result is there (or it failed)."""

    def waited(self, event: CollectiveEvent) -> None:
        """The caller has waited for it."""


Observers = tuple[Observer, ...]
"""Those who get the events of one collective."""


class Pending:
    """What every verb of the communicator returns.

    ``wait()`` returns when the result may be used: on CPU the data is there; on CUDA the current stream waits for it
    and the host goes on. It raises what the collective raised. It may be called again.

    Args:
        finish: waits; None if there is nothing to wait for.
        keep: buffers that must live until then.
        event: of the collective.
        observers: told when it has been waited for.
        mark: of the stream that computes; None on the CPU.
        dropped: gets the event where nobody has called ``wait()``, and nobody can any more.
        now_ns: says the time.
    """

    def __init__(
        self, finish: Callable[[], None] | None = None, *, keep: tuple[Tensor, ...] = (),
        event: CollectiveEvent | None = None, observers: Observers = (), mark: Mark | None = None,
        dropped: list[CollectiveEvent] | None = None, now_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:  # fmt: skip
        self._finish = finish
        self._keep = keep  # a buffer freed in flight would be written into after its reuse
        self._event = event
        self._observers = observers
        self._mark = mark
        self._dropped = dropped
        self._now_ns = now_ns

    def __del__(self) -> None:
        if self._dropped is not None and self._event is not None:
            self._dropped.append(self._event)

    @property
    def has_ended(self) -> bool:
        """Whether the queue has come to its end, so that a wait would return at once; on the CPU."""
        return self._finish is None or (self._event is not None and not isnan(self._event.end_ns))

    def wait(self) -> None:
        """Return when the result may be used; raise the collective's error if it failed."""
        if self._finish is None:
            return
        self._dropped = None
        began_ns = self._now_ns()
        if self._mark is None or self._event is None:
            self._finish()
        else:
            # Compute that was given to the stream before goes on while the host waits, and the stream may wait while
            # the host goes on: only the stream knows for how long it did not compute.
            before = self._mark()
            self._finish()
            self._event.device_wait = (before, self._mark())
        # Only now: if it raised, the transport may still write into the buffers, and wait() may be called again.
        self._finish = None
        self._keep = ()
        if self._event is not None:
            self._event.wait_start_ns, self._event.wait_end_ns = began_ns, self._now_ns()
            for observer in self._observers:
                observer.waited(self._event)


def wait_all(pending: list[Pending]) -> None:
    """Wait for each in order and empty the list."""
    for item in pending:
        item.wait()
    # Only when all have ended: after an error the list still keeps the buffers of what is in flight alive.
    pending.clear()
