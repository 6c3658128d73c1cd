"""What a transport must do, and the queue that runs it beside the compute.

A transport moves the bytes of one collective and returns when they have moved (or are enqueued).

Every tensor is contiguous and one-dimensional. ``bounds`` are the num_ranks + 1 offsets of the ranks' chunks. ``tag``
says what is sent, the same on all ranks, so that a transport can refuse to mix two different collectives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from shardlab.comm.events import CollectiveEvent, Observer

Reduction = Literal["sum", "max"]
Bounds = tuple[int, ...]
Job = Callable[[], None]


class Message(NamedTuple):
    """A send to ``peer``, or a receive from it, of a flat tensor; ``after`` is done once it has come."""

    transport: "Transport"
    is_send: bool
    tensor: Tensor
    peer: int
    after: Job | None = None

    def travel(self) -> None:
        """Go alone."""
        move = self.transport.send if self.is_send else self.transport.recv
        move(self.tensor, self.peer)
        if self.after is not None:
            self.after()


Start = Callable[[], Job | None]
"""Begins what a job would do and returns at once what waits for its end; None: it cannot, and has done nothing."""


class Transport(ABC):
    """How collectives travel in one group of ranks; ranks are positions in the group."""

    name: str
    emulated: bool

    @abstractmethod
    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Reduce ``tensor`` over the group, in place."""

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Callable[[], None] | None:  # noqa: ARG002
        """Begin an all-reduce that goes on by itself, and return the call that waits for its end.

        Returns:
            None where nothing has begun, since only the queue can run it; the default.
        """
        return None

    @abstractmethod
    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Sum ``buffer`` over the group; ``output`` receives this rank's chunk and may be that part of ``buffer``."""

    @abstractmethod
    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Fill ``buffer`` with every rank's chunk; this rank's is in place already."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` from ``src`` to all."""

    @abstractmethod
    def all_to_all(self, output: Tensor, buffer: Tensor, output_sizes: list[int], sizes: list[int]) -> None:
        """Send part j of ``buffer`` to rank j; part i of ``output`` comes from rank i."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to one rank."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive from one rank."""

    def exchange(self, messages: "Sequence[Message]") -> None:
        """Send and receive several messages at once, whatever the order in which the other ranks name theirs."""
        raise NotImplementedError(f"{self.name} sends and receives one message at a time")

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    @abstractmethod
    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:
        """Bytes held during a collective, besides the caller's buffers."""

    def close(self) -> None:
        """Free what only this transport holds; its group is not part of that."""
        return


class Queue(Protocol):
    """Runs jobs one after another; ``submit`` returns at once with the function that waits for this job."""

    def submit(
        self, job: Job, event: CollectiveEvent, observers: tuple[Observer, ...], start: Start | None = None
    ) -> Job:
        """Queue ``job``, or do the same by ``start``; the returned call waits for it and raises what it raised."""

    def submit_message(self, message: Message, event: CollectiveEvent, observers: tuple[Observer, ...]) -> Job:
        """Queue a message so that none of its rank's sends keeps a receive from beginning, nor the other way round."""

    def close(self) -> None:
        """End the queue after the jobs that are in it."""
