"""A step replayed: its compute and its messages in the engines' order, and when each of them begins and ends.

One rank stands for all that are alike, so the number of ranks costs nothing. It is a program of compute and messages
(``partition.step_program``), with a queue for each axis of the mesh (a communicator runs its collectives one after
another). Compute waits for the messages that it needs. Beside a collective it is slower by the factor ``contention``; a
collective beside compute is not. A second program is that of the host, which launches what units compute, in order and
ahead of the device if it can: a unit ends no earlier than the host has launched the last of it.

==============================  ===========================================  ===============================
row (``rows``)                  messages                                     hidden behind
==============================  ===========================================  ===============================
parameters divided, by unit     gather of the next ``prefetch`` units while  forward, backward
                                one computes; without ``regathers`` in
                                forward alone
parameters divided, else        all gathers before each pass                 nothing
by unit                         reduction after a unit's backward            the rest of backward
in buffers, parameters whole    reduction of a bucket, when its gradients    the rest of backward
                                exist
else                            reductions when backward has ended           nothing
stepped is divided, not rests   gather of what was stepped                   nothing
==============================  ===========================================  ===============================

The root's parameters are gathered first, computed with last in forward and first in backward, and reduced last: so the
first gather and the last reduction are exposed. The order of messages is that of the engines.
Sources: Zhao et al., arXiv 2304.11277, section 3.3 (order and prefetch); Li et al., arXiv 2006.15704, section 3.2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.partition.step_program import Contention, Host, Issue, Item, Message, Wait, Work, run_programs
from shardlab.planner.rows import AFTER_THE_STEP, BEFORE_A_PASS, ROWS, Row, Sent
from shardlab.vocabulary import Collective, MeshAxis, Phase

CONTENTION = 0.189  # arXiv 2507.03114, abstract: by how much compute slows beside communication, on average
REPLAYED = tuple(name for name, row in ROWS.items() if row.parameters or not row.by_unit)
DEVICE, HOST = 0, 1  # the two programs
LAUNCHES = ("host", False)  # the queue in which the device learns what the host has launched
MessageSeconds = Callable[[Collective, MeshAxis, float], float]
"""Seconds of a collective over an axis, by the bytes of its whole buffer; 0 where the axis has one rank."""


@dataclass(frozen=True)
class Unit:
    """What is gathered, computed and reduced together.

    Attributes:
        name: of the unit.
        forward_seconds: of its compute in a micro-batch, alone on the device.
        backward_seconds: likewise; recomputation included.
        gathered_bytes: of its whole parameters, as gathers carry them.
        reduced_bytes: of its whole gradients, as reductions carry them.
        num_messages: in how many of equal size they are sent, where they are not sent as a unit.
        forward_host_seconds: that the host takes to launch what a forward computes.
        backward_host_seconds: likewise.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    gathered_bytes: float
    reduced_bytes: float
    num_messages: int = 1
    forward_host_seconds: float = 0.0
    backward_host_seconds: float = 0.0

    def seconds(self, phase: Phase) -> tuple[float, float]:
        """Of the device and of the host, in a pass."""
        if phase == Phase.FORWARD:
            return self.forward_seconds, self.forward_host_seconds
        return self.backward_seconds, self.backward_host_seconds


@dataclass(frozen=True)
class Schedule:
    """What is done with the units in a step.

    Attributes:
        row: what is sent, and when.
        sizes: ranks by axis; of one axis nobody asks.
        prefetch: by unit: units gathered ahead of the one that computes.
        micro_batches: forwards and backwards a step.
        reduces_each: whether each of them reduces gradients, or only the last.
        bucket_bytes: capacity of a bucket.
        optimizer_seconds: of the optimizer's step.
        contention: by how much of its time compute is slower beside a collective.
    """

    row: Row = ROWS["fsdp"]
    sizes: Mapping[MeshAxis, int] = field(default_factory=dict)
    prefetch: int = 1
    micro_batches: int = 1
    reduces_each: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    optimizer_seconds: float = 0.0
    contention: float = CONTENTION


@dataclass(frozen=True)
class Replay:
    """A step that has been run: its program, and when each item and each message began and ended."""

    host: Host

    @property
    def seconds(self) -> float:
        """From the beginning of the step until all has ended."""
        return self.host.end_us / 1e6

    @property
    def computed(self) -> list[tuple[Work, float, float]]:
        """Each stretch of compute, with its begin and end in seconds."""
        times = [us / 1e6 for us in self.host.begins_us]
        of_items = zip(self.host.items, times, times[1:], strict=False)
        return [(item, begin, end) for item, begin, end in of_items if isinstance(item, Work)]

    @property
    def slowed_seconds(self) -> float:
        """How much longer compute took than alone."""
        return sum(end - begin - work.us / 1e6 for work, begin, end in self.computed)

    @property
    def host_seconds(self) -> float:
        """Time without compute: the host had not launched it yet."""
        return self._idle_seconds(of_host=True)

    @property
    def exposed_seconds(self) -> float:
        """Time without compute: a message was waited for."""
        return self._idle_seconds(of_host=False)

    def _idle_seconds(self, *, of_host: bool) -> float:
        begins = self.host.begins_us
        waits = zip(self.host.items, begins, begins[1:], strict=False)
        return sum(
            end - begin for item, begin, end in waits
            if isinstance(item, Wait) and (item.message.queue == LAUNCHES) == of_host
        ) / 1e6  # fmt: skip


def replay(units: Sequence[Unit], schedule: Schedule, seconds: MessageSeconds, root: Unit | None = None) -> Replay:
    """When everything in a step begins and ends, on each of the ranks, which are alike.

    Args:
        units: at least one, in the order of forward.
        schedule: what is done with them.
        seconds: of a collective over an axis of the row.
        root: the unit of all other parameters, such as embedding and head; None without one.
    """
    step = _Step(units, schedule, seconds, root)
    device = [*step.items, *(Wait(item.message) for item in step.items if isinstance(item, Issue))]
    programs = {DEVICE: (*(item for item in step.launches if isinstance(item, Issue)), *device)}
    if step.launches:
        programs[HOST] = tuple(step.launches)
    return Replay(run_programs(programs, contention=Contention(schedule.contention))[DEVICE])


def host_is_behind(units: Iterable[Unit]) -> bool:
    """Whether the device is done with a pass of a unit before the host has launched it; else it never waits for it."""
    passes = (Phase.FORWARD, Phase.BACKWARD)
    return any(host > device for unit in units for device, host in map(unit.seconds, passes))


class _Step:
    """The program of a step."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule, seconds: MessageSeconds, root: Unit | None) -> None:
        self.schedule, self.row, self.message_seconds, self.root = schedule, schedule.row, seconds, root
        sizes = dict.fromkeys(MeshAxis, 1) | {**schedule.sizes}
        self.to_gather, self.to_reduce = self.row.gathered(BEFORE_A_PASS, sizes), [*self.row.reduced(sizes)]
        self.items: list[Item] = []
        self.launches: list[Item] = []  # the program of the host
        self.sent: list[Message] = []  # what the optimizer has to wait for
        self.order = [*units, *([root] if root else [])]
        self.is_behind = host_is_behind(self.order)
        self.together = self._sent_together()
        micro_batch = self.unit_by_unit if self.row.by_unit else self.all_at_once
        for number in range(schedule.micro_batches):
            micro_batch(reduces=number == schedule.micro_batches - 1 or schedule.reduces_each)
        self.compute(schedule.optimizer_seconds, self.sent)
        stepped = self.row.gathered(AFTER_THE_STEP, sizes)
        for unit in self.together:
            self.messages(stepped, Phase.STEP, unit)

    def _sent_together(self) -> list[Unit]:
        """What shares messages, in the order of the engine's units or buckets."""
        if self.row.by_unit:  # the root is gathered first, and computes last
            return [self.order[-1], *self.order[:-1]] if self.root else self.order
        if not self.row.packs:
            return self.order
        backwards = self.order[::-1]  # as buckets are filled
        return backwards if self.row.parameters else list(_buckets(backwards, self.schedule.bucket_bytes))

    def compute(self, seconds: float, awaited: Iterable[Message] = ()) -> None:
        self.items += [*map(Wait, awaited), Work(1e6 * seconds)]

    def run(self, unit: Unit, phase: Phase, awaited: Iterable[Message]) -> None:
        """Compute a unit: it ends no earlier than the host has launched the last of it."""
        seconds, host_seconds = unit.seconds(phase)
        self.compute(seconds, awaited)
        if self.is_behind:
            launched = Message(Collective.UNKNOWN, unit.name, phase, 0, LAUNCHES, {DEVICE: 0.0, HOST: 0.0})
            self.launches += [Work(1e6 * host_seconds), Issue(launched)]
            self.items.append(Wait(launched))

    def messages(self, kinds: Iterable[Sent], phase: Phase, unit: Unit) -> list[Message]:
        """Those of a unit, when the compute before them has ended, each after the one before it."""
        found: list[Message] = []
        for op, axis, share in kinds:
            num_bytes = unit.gathered_bytes if op == Collective.ALL_GATHER else unit.reduced_bytes
            num_bytes = num_bytes * share.numerator / share.denominator
            count = 1 if self.row.by_unit else unit.num_messages
            us = 1e6 * count * self.message_seconds(op, axis, num_bytes / count)
            after = found[-1] if found else None
            found.append(Message(op, unit.name, phase, ceil(num_bytes), (axis, False), {0: us}, after=after))
        self.items += map(Issue, found)
        return found

    def gather(self, phase: Phase, unit: Unit) -> list[Message]:
        """The parameters of a unit; nothing where they are whole, or have been kept."""
        again = phase == Phase.FORWARD or self.row.regathers
        return self.messages(self.to_gather if again else (), phase, unit)

    def reduce(self, unit: Unit) -> None:
        """The gradients of a unit, over all axes."""
        self.sent += self.messages(self.to_reduce, Phase.BACKWARD, unit)

    def unit_by_unit(self, *, reduces: bool) -> None:
        """A micro-batch in which units are gathered and reduced one by one."""
        self.passed(Phase.FORWARD, self.order, self.together, reduces=False)
        order = self.order[::-1]  # the root first here, too: the output is the root's
        self.passed(Phase.BACKWARD, order, order, reduces)
        if self.root and reduces:
            self.reduce(self.root)

    def passed(self, phase: Phase, order: Sequence[Unit], gathers: Sequence[Unit], reduces: bool) -> None:
        """One pass over the units: before each its gather, and those of the next ones; after it its reduction."""
        forward = phase == Phase.FORWARD
        gathered: dict[str, list[Message]] = {}
        for place, unit in enumerate(order):
            # In forward the root is gathered in front, and computes at the end.
            ahead = place + 1 + self.schedule.prefetch + (forward and self.root is not None)
            for other in gathers[len(gathered) : ahead]:
                gathered[other.name] = self.gather(phase, other)
            self.run(unit, phase, gathered[unit.name])
            if reduces and unit is not self.root:
                self.reduce(unit)

    def all_at_once(self, *, reduces: bool) -> None:
        """A micro-batch whose parameters, if they are divided, are all gathered before each pass."""
        as_ready = self.row.packs and not self.row.parameters
        complete = {bucket.name: bucket for bucket in self.together} if as_ready and reduces else {}
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            forward = phase == Phase.FORWARD
            gathered = [one for unit in self.together for one in self.gather(phase, unit)]
            for unit in self.order if forward else self.order[::-1]:
                self.run(unit, phase, gathered[-1:])
                if not forward and unit.name in complete:
                    self.reduce(complete[unit.name])
        for unit in self.together if reduces and not as_ready else ():
            self.reduce(unit)


def _buckets(units: Sequence[Unit], capacity: float) -> Iterable[Unit]:
    """Units merged up to the capacity of a bucket, named after the last, whose backward completes the bucket."""
    held: list[Unit] = []
    *_, last = units
    for unit in units:
        held.append(unit)
        reduced = sum(one.reduced_bytes for one in held)
        if reduced >= capacity or unit is last:
            count = min(sum(one.num_messages for one in held), max(1, ceil(reduced / capacity)))
            yield Unit(unit.name, 0, 0, sum(one.gathered_bytes for one in held), reduced, count)
            held = []
