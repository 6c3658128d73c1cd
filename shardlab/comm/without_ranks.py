"""Ranks that are none: threads of one process, which meet in its memory, do what a group of ranks would do.

Where shapes alone are needed, ``comm.foretold`` has one rank of a group of which nothing else exists.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Observers
from shardlab.comm.transports.base import Bounds, Job, Message, Reduction, Start, Transport

T = TypeVar("T")


def on_threads(num_ranks: int, function: Callable[[Communicator], T], axis: str) -> list[T]:
    """What ``function`` returns on each of ``num_ranks`` threads, which call it with communicators of one group.

    Raises:
        Exception: that of the first thread that failed; the others are released from their collectives.
    """
    meeting = Meeting(num_ranks)

    def run(rank: int) -> T:
        transport = None if num_ranks == 1 else MemoryTransport(meeting, rank)
        comm = Communicator(transport, _AtOnce(), range(num_ranks), rank, axis)
        # Not those of this process: its hang board would show a collective that no rank is in.
        comm._observers = ()
        try:
            return function(comm)
        except Exception:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        ranks = [threads.submit(run, rank) for rank in range(num_ranks)]
    for error in (rank.exception() for rank in ranks):
        # Where a barrier is broken another thread has failed, and says why.
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [rank.result() for rank in ranks]


class Meeting:
    """Where threads put their tensors, and wait until all have."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self._given: list[Any] = [None] * num_ranks

    def exchange(self, rank: int, given: Any, take: Callable[[list[Any]], T]) -> T:
        """What ``take`` makes of the tensors of all; afterwards each may change its own."""
        self._given[rank] = given
        self.barrier.wait()
        taken = take(self._given)
        # Nobody leaves before all have taken: the next collective puts other tensors into the same places.
        self.barrier.wait()
        return taken


class MemoryTransport(Transport):
    """Tensors of threads of one process, read from where they lie."""

    name, emulated = "memory", False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Each thread reduces all of it."""

        def take(tensors: list[Tensor]) -> Tensor:
            stacked = torch.stack(tensors)
            return stacked.sum(0) if reduction == "sum" else stacked.amax(0)

        tensor.copy_(self._meeting.exchange(self._rank, tensor, take))

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Each thread sums its own chunk."""
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        output.copy_(
            self._meeting.exchange(self._rank, buffer, lambda given: torch.stack([x[own] for x in given]).sum(0))
        )

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Each thread takes every chunk from its rank's buffer."""

        def take(buffers: list[Tensor]) -> Tensor:
            return torch.cat([other[bounds[rank] : bounds[rank + 1]] for rank, other in enumerate(buffers)])

        buffer.copy_(self._meeting.exchange(self._rank, buffer, take))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """A copy of the source's tensor."""
        # A clone: once they have met, the source may change its tensor while others still copy.
        tensor.copy_(self._meeting.exchange(self._rank, tensor, lambda tensors: tensors[src].clone()))

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Each thread takes its part of all buffers."""

        def take(buffers: list[Tensor]) -> Tensor:
            return torch.cat([other.chunk(len(buffers))[self._rank] for other in buffers])

        output.copy_(self._meeting.exchange(self._rank, buffer, take))

    def barrier(self) -> None:
        """Wait until all have come."""
        self._meeting.barrier.wait()


class _AtOnce:
    """A queue that runs each job when it is given."""

    def submit(self, job: Job, event: CollectiveEvent, observers: Observers, start: Start | None = None) -> Job:
        """Run ``job``."""
        job()
        return lambda: None

    def submit_message(self, message: Message, event: CollectiveEvent, observers: Observers) -> Job:
        """Run it."""
        return self.submit(message.travel, event, observers)

    def close(self) -> None:
        """Nothing is left to run."""
