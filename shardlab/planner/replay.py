"""A step replayed: its compute and its messages in the engines' order, and when each of them begins and ends.

One rank stands for all that are alike, so the number of ranks costs nothing. It is a program of compute and messages
(``partition.step_program``), with a queue for each axis of the mesh (a communicator runs its collectives one after
another). Compute waits for the messages that it needs. Beside a collective it is slower by the factor ``contention``; a
collective beside compute is not.

=============  ==================================================  ==================================
strategy       messages                                            hidden behind
=============  ==================================================  ==================================
ddp            all-reduce of each unit, when backward has ended    nothing
bucketed       all-reduce of a bucket, when its gradients exist    the rest of backward
zero1, zero2   reduce-scatter likewise; all-gather after the step  the rest of backward; nothing
zero3          all gathers before forward and before backward,     nothing
               reduce-scatters after it
fsdp           gather of the next ``prefetch`` units while one     forward, backward
               computes, reduce-scatter after its backward
shard_grad_op  the same without gathers in backward                forward, backward
hybrid_shard   as fsdp within a group of ranks, then an            forward, backward
               all-reduce of the shard over the replicas
=============  ==================================================  ==================================

The root's parameters are gathered first, computed with last in forward and first in backward, and reduced last: so the
first gather and the last reduction are exposed. The order of messages is that of ``collectives`` and ``groups``.
Sources: Zhao et al., arXiv 2304.11277, section 3.3 (order and prefetch); Li et al., arXiv 2006.15704, section 3.2.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.partition.step_program import Contention, Host, Issue, Item, Message, Wait, Work, run_programs
from shardlab.vocabulary import Collective, MeshAxis, Phase

CONTENTION = 0.189  # arXiv 2507.03114, abstract: by how much compute slows beside communication, on average
FULLY_SHARDED = ("fsdp", "shard_grad_op", "hybrid_shard")
REPLAYED = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", *FULLY_SHARDED)
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
        num_messages: in how many of equal size ddp and zero3 send them; the units of FSDP are one.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    gathered_bytes: float
    reduced_bytes: float
    num_messages: int = 1


@dataclass(frozen=True)
class Schedule:
    """What is done with the units in a step.

    Attributes:
        strategy: one of ``REPLAYED``.
        prefetch: fully sharded: units gathered ahead of the one that computes.
        micro_batches: forwards and backwards a step.
        reduces_each: whether each of them reduces gradients, or only the last.
        bucket_bytes: bucketed, zero1, zero2: capacity of a bucket.
        shard_group_size: hybrid_shard: ranks that shard among themselves.
        optimizer_seconds: of the optimizer's step.
        contention: by how much of its time compute is slower beside a collective.
    """

    strategy: str = "fsdp"
    prefetch: int = 1
    micro_batches: int = 1
    reduces_each: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    shard_group_size: int = 1
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
    def exposed_seconds(self) -> float:
        """Time without compute: a message was waited for."""
        return self.seconds - sum(end - begin for _, begin, end in self.computed)


def replay(units: Sequence[Unit], schedule: Schedule, seconds: MessageSeconds, root: Unit | None = None) -> Replay:
    """When everything in a step begins and ends, on each of the ranks, which are alike.

    Args:
        units: at least one, in the order of forward.
        schedule: what is done with them.
        seconds: of a collective over an axis: 'shard' and 'replica' in hybrid_shard, else 'data'.
        root: the unit of all other parameters, such as embedding and head; None without one.
    """
    items = _Step(units, schedule, seconds, root).items
    items += [Wait(item.message) for item in items if isinstance(item, Issue)]
    return Replay(run_programs({0: tuple(items)}, contention=Contention(schedule.contention))[0])


class _Step:
    """The program of a step."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule, seconds: MessageSeconds, root: Unit | None) -> None:
        self.schedule, self.message_seconds, self.root = schedule, seconds, root
        self.items: list[Item] = []
        self.sent: list[Message] = []  # what the optimizer has to wait for
        self.forward_order = [*units, *([root] if root else [])]
        self.buckets = list(_buckets(self.forward_order[::-1], schedule.bucket_bytes))
        self.axis = MeshAxis.SHARD if schedule.strategy == "hybrid_shard" else MeshAxis.DATA
        micro_batch = self.sharded if schedule.strategy in FULLY_SHARDED else self.bucketed
        for number in range(schedule.micro_batches):
            micro_batch(reduces=number == schedule.micro_batches - 1 or schedule.reduces_each)
        self.compute(schedule.optimizer_seconds, self.sent)
        if schedule.strategy in ("zero1", "zero2"):
            for bucket in self.buckets:
                self.message(Collective.ALL_GATHER, Phase.STEP, bucket)

    def compute(self, seconds: float, awaited: Iterable[Message] = ()) -> None:
        self.items += [*map(Wait, awaited), Work(1e6 * seconds)]

    def message(
        self, op: Collective, phase: Phase, unit: Unit, axis: MeshAxis | None = None, after: Message | None = None
    ) -> Message:
        """A message of a unit over an axis, when the compute before it has ended."""
        axis = axis or self.axis
        num_bytes = unit.gathered_bytes if op == Collective.ALL_GATHER else unit.reduced_bytes
        if axis == MeshAxis.REPLICA:
            num_bytes /= self.schedule.shard_group_size
        count = 1 if self.schedule.strategy in FULLY_SHARDED else unit.num_messages
        us = 1e6 * count * self.message_seconds(op, axis, num_bytes / count)
        message = Message(op, unit.name, phase, ceil(num_bytes), (axis, False), {0: us}, after=after)
        self.items.append(Issue(message))
        return message

    def sharded(self, *, reduces: bool) -> None:
        """A micro-batch of FSDP."""
        first = [self.root] if self.root else []
        self.passed(Phase.FORWARD, self.forward_order, [*first, *self.forward_order[: -1 if first else None]], False)
        order = self.forward_order[::-1]  # the root first here, too: the output is the root's
        self.passed(Phase.BACKWARD, order, order, reduces)
        if self.root and reduces:
            self.reduce(self.root)

    def passed(self, phase: Phase, order: Sequence[Unit], gathers: Sequence[Unit], reduces: bool) -> None:
        """One pass over the units: before each its gather, and those of the next ones; after it its reduction."""
        forward = phase == Phase.FORWARD
        gathered: dict[str, Message] = {}
        again = forward or self.schedule.strategy != "shard_grad_op"
        for place, unit in enumerate(order):
            # In forward the root is gathered in front, and computes at the end.
            ahead = place + 1 + self.schedule.prefetch + (forward and self.root is not None)
            for other in gathers[len(gathered) : ahead] if again else ():
                gathered[other.name] = self.message(Collective.ALL_GATHER, phase, other)
            seconds = unit.forward_seconds if forward else unit.backward_seconds
            self.compute(seconds, [gathered[unit.name]] if again else ())
            if reduces and unit is not self.root:
                self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """The gradients of a unit, over all axes."""
        scattered = self.message(Collective.REDUCE_SCATTER, Phase.BACKWARD, unit)
        self.sent.append(scattered)
        if self.axis == MeshAxis.SHARD:
            self.sent.append(self.message(Collective.ALL_REDUCE, Phase.BACKWARD, unit, MeshAxis.REPLICA, scattered))

    def bucketed(self, *, reduces: bool) -> None:
        """A micro-batch of all others; zero3 gathers everything in front of forward and of backward."""
        strategy = self.schedule.strategy
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            order = self.forward_order if phase == Phase.FORWARD else self.forward_order[::-1]
            gathers = self.forward_order if strategy == "zero3" else []  # the same order in backward, as in the engine
            gathered = [self.message(Collective.ALL_GATHER, phase, unit) for unit in gathers]
            full = {bucket.name: bucket for bucket in self.buckets}
            for unit in order:
                seconds = unit.forward_seconds if phase == Phase.FORWARD else unit.backward_seconds
                self.compute(seconds, gathered[-1:])
                early = strategy in ("bucketed", "zero1", "zero2") and phase == Phase.BACKWARD and reduces
                if early and unit.name in full:
                    op = Collective.ALL_REDUCE if strategy == "bucketed" else Collective.REDUCE_SCATTER
                    self.sent.append(self.message(op, phase, full[unit.name]))
        if reduces and strategy in ("ddp", "zero3"):
            op = Collective.ALL_REDUCE if strategy == "ddp" else Collective.REDUCE_SCATTER
            self.sent += [self.message(op, Phase.BACKWARD, unit) for unit in self.forward_order]


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
