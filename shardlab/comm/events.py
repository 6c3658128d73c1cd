"""What a communicator tells about each collective, and to whom.

The communicator knows nothing of recorders: it fills in one ``CollectiveEvent`` per call and hands it to observers. A
recorder turns events into table rows; the hang board writes the last one where the parent process can read it.
"""

from dataclasses import dataclass, field
from math import nan
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from shardlab.vocabulary import Collective

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class CollectiveEvent:
    """One collective on one rank; times are nanoseconds of ``time.perf_counter_ns``, NaN until they are known.

    Attributes:
        seq: position among the collectives of this communicator, from 0.
        numel: elements of the whole buffer; ``num_bytes`` likewise.
        wire_bytes: bytes this rank sends by the ring formula (``partition.wire``).
        scratch_bytes: bytes the transport holds between start and end beside the caller's buffers.
        storage: identity of the buffer's storage while it is alive, so that a memory ledger can tell what it is.
        source_line: ``file:line`` of the caller outside the library.
        device_times: CUDA events at begin and end, where a stream ran it: whoever records resolves them after the step.
    """

    seq: int
    op: Collective
    axis: str
    tag: str
    dtype: str
    numel: int
    num_bytes: int
    wire_bytes: float
    group_size: int
    transport: str
    emulated: bool
    source_line: str
    scratch_bytes: int = 0
    storage: int = 0
    issue_ns: float = field(default_factory=perf_counter_ns)
    start_ns: float = nan
    end_ns: float = nan
    wait_start_ns: float = nan
    wait_end_ns: float = nan
    device_times: "tuple[torch.cuda.Event, torch.cuda.Event] | None" = None


class Observer(Protocol):
    """Whoever wants to know. Calls must be short; ``completed``, mostly ``started`` too, come from a lane's thread."""

    def issued(self, event: CollectiveEvent) -> None:
        """The caller asked for the collective."""

    def started(self, event: CollectiveEvent) -> None:
        """The transport began it."""

    def completed(self, event: CollectiveEvent) -> None:
        """Its result is there (or it failed)."""

    def waited(self, event: CollectiveEvent) -> None:
        """The caller has waited for it."""
