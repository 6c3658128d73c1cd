"""Messages of a rank whose group is not there: they take the time that is foretold, on a clock that is told.

Compute and messages go on side by side (``partition.step_program``). The messages of an axis move one after another, as
in a queue. While one moves beside compute, both take longer: they want the same cores, or the same memory. The part of
a message that only waits for an emulated link slows nobody.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlab.comm.base_mesh import BaseMesh, Groups, groups_along
from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Observers, Pending
from shardlab.comm.transports.base import Job, Message
from shardlab.comm.without_ranks import Meeting, MemoryTransport
from shardlab.partition.step_program import Contention, Rank, Transfer
from shardlab.vocabulary import FLAG, Collective


class Costs(NamedTuple):
    """What a message costs, in seconds: it moves, alone, at least so long, after its ranks have met."""

    moves: float
    least: float = 0.0
    meets: float = 0.0


@dataclass(frozen=True)
class Wire:
    """What is foretold of all messages.

    Attributes:
        costs: of a message.
        slows_compute: by how much of its time compute takes longer beside a message that moves.
        slowed_by_compute: by how much of its time a message takes longer beside compute.
        meeting: seconds that a message takes longer because ranks come from compute at different moments.
        transport: its name, in every event.
        emulated: whether it emulates a link.
        scratch_bytes: of a reduce-scatter of so many bytes over so many ranks.
    """

    costs: Callable[[CollectiveEvent], Costs]
    slows_compute: float = 0.0
    slowed_by_compute: float = 0.0
    meeting: float = 0.0
    transport: str = "foretold"
    emulated: bool = False
    scratch_bytes: Callable[[int, int], int] = lambda *_: 0


class ToldClock(Rank):
    """Time that goes on when it is told, and the messages that move meanwhile.

    Args:
        wire: what messages cost.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__(0.0, Contention(wire.slows_compute, wire.slowed_by_compute))
        self.wire = wire
        self._computed = 0.0  # seconds since the last message was sent
        self._owed = 0.0

    @property
    def now(self) -> float:
        """The time in seconds from 0."""
        return self.now_us / 1e6

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds."""
        return round(1e3 * self.now_us)

    # As the recorder's clock.

    def mark(self) -> int:
        """Now."""
        return self.now_ns

    def cpu_time(self) -> None:
        """Nobody is off a CPU."""

    def resolve(self, marks: Any) -> Any:
        """The marks themselves."""
        return marks

    def settle(self) -> None:
        """Nothing to wait for."""

    def compute(self, seconds: float) -> None:
        """Compute for what takes so long alone."""
        seconds, self._owed = seconds + self._owed, 0.0
        self._computed += seconds
        self.left_us = 1e6 * seconds
        while self.left_us > 0:
            self.advance()

    def owe(self, seconds: float) -> None:
        """Let the next compute take so much longer."""
        self._owed = seconds

    def send(self, event: CollectiveEvent, observers: Observers) -> Transfer:
        """Put a message into the queue of its axis."""
        costs, late = self.wire.costs(event), min(self.wire.meeting, self._computed)
        moves, least, meets = (1e6 * seconds for seconds in costs)
        self._computed = 0.0
        sent = Transfer((event, observers), moves, max(moves, least) + 1e6 * late, meets, issued_us=self.now_us)
        self.queues.setdefault(event.axis, deque()).append(sent)
        self.do_due()  # one that takes no time has ended
        return sent

    def wait(self, sent: Transfer) -> None:
        """Let time go on until a message has ended."""
        while sent.ended_us == inf:
            self.advance()

    def started(self, transfer: Transfer) -> None:
        """A message has left its queue; its ranks come as soon."""
        super().started(transfer)
        event, observers = transfer.of
        event.start_ns = self.now_ns
        for observer in observers:
            observer.started(event)

    def ended(self, transfer: Transfer) -> None:
        """Its result is there."""
        event, observers = transfer.of
        event.end_ns = self.now_ns
        for observer in observers:
            observer.completed(event)


class ForetoldCommunicator(Communicator):
    """One rank of a group of which nothing else exists, whose messages take time on a clock.

    It announces every collective and moves nothing: shapes come out right, values do not. That is enough for tensors
    without memory, and its observers see each message of a step before any rank has started.

    Args:
        ranks: global ranks of the group.
        rank: which of them this one is.
        axis: the axis' name.
        clock: on which messages take time.
        are_alike: whether the others use the parameters that this rank uses; else together they use all.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, axis: str, clock: ToldClock, *, are_alike: bool) -> None:
        super().__init__(MemoryTransport(Meeting(len(ranks)), rank), None, ranks, rank, axis)
        self._observers = ()  # not those of this process, which wait for a collective's end
        self._clock, self._are_alike = clock, are_alike

    def _submit(self, op: Collective, buffer: Tensor | None, job: Job | Message, tag: str, **sizes: Any) -> Pending:
        clock, wire, keep, _ = self._clock, self._clock.wire, sizes.pop("keep", ()), sizes.pop("start", None)
        if tag == FLAG and buffer is not None and not self._are_alike:
            buffer.numpy()[1:] = 1  # by NumPy: on the clock of the engine's operations other ranks' take no time
        if op == Collective.RECV and buffer is not None and tag.startswith("gradient of tied "):
            # Behind it stands whether the weight was used (``pipeline``): it was. Of any dtype that is 2 or more.
            buffer.untyped_storage()[buffer.nbytes - 1] = 0x40
        if op == Collective.REDUCE_SCATTER and (chunk_bytes := sizes.get("own_chunk_bytes")) is not None:
            sizes["scratch_bytes"] = wire.scratch_bytes(chunk_bytes * self.num_ranks, self.num_ranks)
        event = self.announce(op, () if buffer is None else (buffer,), tag, transport=wire.transport, **sizes)
        event.issue_ns, event.emulated = clock.now_ns, wire.emulated
        sent = clock.send(event, self._observers)
        return Pending(
            lambda: clock.wait(sent), keep=keep, event=event, observers=self._observers, now_ns=lambda: clock.now_ns
        )


class ForetoldMesh(BaseMesh):
    """A mesh of which one rank exists.

    Args:
        axes: size of each axis by name, slowest first.
        rank: which rank this is.
        clock: on which messages take time; None where they take none.
        are_alike: whether the other ranks use the parameters that this one uses; else together they use all.
    """

    def __init__(
        self, axes: Mapping[str, int], rank: int, clock: ToldClock | None = None, *, are_alike: bool = True
    ) -> None:
        super().__init__(axes, range(prod(axes.values())), torch.device("cpu"))
        self._rank, self._are_alike = rank, are_alike
        self._clock = clock or ToldClock(Wire(lambda _: Costs(0.0)))
        self.places: dict[str, dict[int, int]] = {}
        """By axis, part or product, of each rank its place in its group."""
        self._communicators = self._make({axis: groups_along(self.axes, self.ranks, axis) for axis in self.axes})

    def _make(self, groups: Mapping[str, Groups]) -> dict[str, Communicator]:
        own = {name: next(line for line in lines if self._rank in line) for name, lines in groups.items()}
        for name, lines in groups.items():
            self.places[name] = {rank: place for line in lines for place, rank in enumerate(line)}
        return {
            name: Communicator(None, None, line, 0, name) if len(line) == 1
            else ForetoldCommunicator(line, line.index(self._rank), name, self._clock, are_alike=self._are_alike)
            for name, line in own.items()
        }  # fmt: skip
