"""How long a step takes: a program of each rank, run on a clock of its own, and the chain of causes of its end.

A program is what a rank's host does, in order: work, issue a message, wait for one. Causes (WHY), what a change would
gain, the critical path and the forecasts all stand on this run.

=======  ======================================================  =========================
message  happens when the last of these has happened             and this has passed
=======  ======================================================  =========================
issued   the host has done what came before                      nothing
started  issued, the one before it in its queue has ended, and   dispatch
         so has the one that it comes ``after``
met      every rank has started it                               nothing
ended    met                                                     meeting, and the transfer
=======  ======================================================  =========================

A host that waits goes on when the message has ended, and it has woken up. Work beside a message that moves may take
longer, and a message beside work (``Contention``). What a record says has happened already with all that was beside it,
so it is run without. Times are microseconds.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, ulp
from typing import Any, NamedTuple

from shardlab.vocabulary import Collective, MeshAxis, Phase

TINY_US = 1e-6  # what is shorter takes no time


@dataclass(frozen=True, eq=False)
class Message:
    """One collective on all its ranks.

    Attributes:
        queue: messages of one queue travel one after another: an axis, of which sends have a queue of their own.
        lanes: by rank, of a queue that moves several at once; none is 0.
        transfer_us: by rank, alone, from the moment its last rank has started it until it has ended there.
        dispatch_us: by rank, from the moment it could start until it does; none is 0.
        group_size: of all its ranks, also those without a program; 0 where nobody asks.
        after: another message of the same ranks that ends before this one starts, without a host that waits.
    """

    op: Collective
    tag: str
    phase: Phase
    num_bytes: int
    queue: tuple[str, bool]
    transfer_us: Mapping[int, float]
    dispatch_us: Mapping[int, float] = field(default_factory=dict)
    group_size: int = 0
    after: "Message | None" = None
    lanes: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_inside(self) -> bool:
        """Whether it is between two operations of a divided model, so that no other order or size is to be had."""
        return self.queue[0] == MeshAxis.TENSOR


@dataclass(frozen=True)
class Work:
    """The host does anything but wait; ``us`` is how long it takes alone, the times are those of a record."""

    us: float
    start_us: float = 0.0
    end_us: float = 0.0

    def cut(self, share: float) -> tuple["Work", "Work"]:
        """The first ``share`` of it and the rest."""
        middle, us = self.start_us + share * (self.end_us - self.start_us), share * self.us
        return Work(us, self.start_us, middle), Work(self.us - us, middle, self.end_us)


@dataclass(frozen=True)
class Issue:
    """The host hands a message to its queue."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """The host waits for a message, and goes on ``wake_us`` after it has ended."""

    message: Message
    wake_us: float = 0.0


Item = Work | Issue | Wait
Program = tuple[Item, ...]


@dataclass(frozen=True)
class Contention:
    """By how much of its time work takes longer beside a message that moves, and a message beside work."""

    work: float = 0.0
    message: float = 0.0


ALONE = Contention()


@dataclass(eq=False, slots=True)
class Transfer:
    """A message on one rank: what it costs, and when it got how far (inf until then).

    Attributes:
        of: whose transfer it is.
        moves_us: alone; what contends with work.
        least_us: as long as it takes at least once ranks have met, whatever is beside it.
        meets_us: until ranks have met when the last has started it; contends, too.
        dispatch_us: from the moment it could start until it does.
        before: the one before it in its queue, if it had to wait for that.
        after: another that it waits for.
        left_us: of meeting and moving, alone.
    """

    of: Any
    moves_us: float
    least_us: float = 0.0
    meets_us: float = 0.0
    dispatch_us: float = 0.0
    before: "Transfer | None" = None
    after: "Transfer | None" = None
    issued_us: float = inf
    ready_us: float = inf
    started_us: float = inf
    met_us: float = inf
    ended_us: float = inf
    left_us: float = 0.0
    _until_us: float = inf  # it ends no earlier

    def meet(self, now_us: float) -> None:
        """Its last rank has started it."""
        self.met_us, self.left_us = now_us, _less(self.meets_us + self.moves_us)
        self._until_us = now_us + self.meets_us + max(self.moves_us, self.least_us)

    def move(self, us: float, slowed: float) -> None:
        """Come so much farther, beside work that makes it slower by a factor."""
        # The least time begins when ranks have met, which takes longer beside work.
        self._until_us += slowed * min(us, max(0.0, self.left_us - self.moves_us))
        self.left_us = _less(self.left_us, us)

    def next_us(self, now_us: float, pace: float) -> float:
        """In how long it starts, has moved or ends, at the head of its queue; inf if others have to do something."""
        if self.started_us == inf:
            return self.ready_us + self.dispatch_us - now_us if self.ready_us < inf else inf
        return self.left_us * pace if self.left_us > 0 else self._until_us - now_us


class Rank:
    """A rank as time goes on: its host, which works, rests or waits, and the messages of its queues."""

    def __init__(self, now_us: float = 0.0, contention: Contention = ALONE) -> None:
        self.now_us, self.contention = now_us, contention
        self.queues: dict[Hashable, deque[Transfer]] = {}
        self.left_us, self.works = 0.0, True  # of what the host does; whether that contends

    def started(self, transfer: Transfer) -> None:
        """A transfer has started here; other ranks are not looked at, unless a subclass does."""
        transfer.meet(self.now_us)

    def ended(self, transfer: Transfer) -> None:
        """A transfer has ended here."""

    def until_change_us(self) -> float:
        """Until the host has done what it does, or the first message of a queue starts, has moved, or ends."""
        now_us, pace = self.now_us, 1 + self._slowed
        least_us = self.left_us * self._pace(self._moving()) if self.left_us > 0 else inf
        for queue in self.queues.values():
            if queue and (us := queue[0].next_us(now_us, pace)) < least_us:
                least_us = us
        # Beside hours what is too short to add would be left for ever.
        return max(least_us, ulp(now_us)) if least_us > 0 else 0.0

    def go_to(self, now_us: float) -> None:
        """Let time go on, no farther than to the next change."""
        if (us := now_us - self.now_us) == 0:
            return
        slowed, moving = self._slowed, self._moving()
        done = us / self._pace(moving)
        for transfer in moving:
            transfer.move(us / (1 + slowed), slowed)
        self.left_us = _less(self.left_us, done)
        self.now_us = now_us

    def do_due(self) -> None:
        """Let all happen that happens now; what ends in one queue may let another go on."""
        while True in [self._ends(queue) for queue in self.queues.values() if queue]:
            pass

    def advance(self) -> None:
        """Go to the next change."""
        self.go_to(self.now_us + self.until_change_us())
        self.do_due()

    @property
    def _slowed(self) -> float:
        return self.contention.message if self.works and self.left_us > 0 else 0.0

    def _moving(self) -> list[Transfer]:
        return [queue[0] for queue in self.queues.values() if queue and queue[0].left_us > 0]

    def _pace(self, moving: list[Transfer]) -> float:
        return 1 + self.contention.work if moving and self.works else 1.0

    def _ends(self, queue: deque[Transfer]) -> bool:
        """Let the first messages of a queue start and end; whether one has ended."""
        now_us, has_ended = self.now_us, False
        while queue:
            first = queue[0]
            if first.ready_us == inf > first.issued_us and (first.after is None or first.after.ended_us < inf):
                first.ready_us = now_us
            if first.next_us(now_us, 1.0) > TINY_US:
                break
            if first.started_us == inf:
                first.started_us = now_us
                self.started(first)
            else:
                first.ended_us, has_ended = now_us, True
                queue.popleft()
                if queue:
                    queue[0].before = first
                self.ended(first)
        return has_ended


def _less(left_us: float, us: float = 0.0) -> float:
    return left if (left := left_us - us) > TINY_US else 0.0


class Host(Rank):
    """A rank with a program.

    Args:
        items: the program.
        now_us: when it begins.
        order: the messages of its queues.
        meet: told of each message that has started here.
        contention: how work and messages slow each other.

    Attributes:
        begins_us: when each item began, and when the last one ended.
        transfers: of its messages.
    """

    def __init__(
        self, rank: int, items: Program, now_us: float, order: Mapping[Hashable, Collection[Message]],
        meet: Callable[[Message], None], contention: Contention,
    ) -> None:  # fmt: skip
        super().__init__(now_us, contention)
        self.items, self.begins_us, self._meet = items, list[float](), meet
        self._place = 0
        self.transfers = {
            one: Transfer(one, one.transfer_us[rank], dispatch_us=one.dispatch_us.get(rank, 0.0))
            for messages in order.values() for one in messages
        }  # fmt: skip
        for one, transfer in self.transfers.items():
            transfer.after = None if one.after is None else self.transfers[one.after]
        self.queues = {queue: deque(map(self.transfers.__getitem__, own)) for queue, own in order.items()}

    @property
    def end_us(self) -> float:
        """When its program has ended; inf if that never happens."""
        return self.begins_us[-1] if len(self.begins_us) > len(self.items) else inf

    def started(self, transfer: Transfer) -> None:
        """It is met when it has started everywhere."""
        if len(transfer.of.transfer_us) > 1:
            self._meet(transfer.of)
        else:
            super().started(transfer)

    def do_due(self) -> None:
        """Let all happen that happens now."""
        super().do_due()
        while not self.left_us:
            if len(self.begins_us) == self._place:
                self.begins_us.append(self.now_us)
            if self._place == len(self.items) or not self._begins(self.items[self._place]):
                break
            self._place += 1

    def _begins(self, item: Item) -> bool:
        """Whether the host does an item; else it waits."""
        if isinstance(item, Work):
            self.left_us, self.works = _less(item.us), True
            return True
        transfer = self.transfers[item.message]
        if isinstance(item, Issue):
            transfer.issued_us = self.now_us
            super().do_due()
            return True
        if transfer.ended_us == inf:
            return False
        self.left_us, self.works = _less(item.wake_us), False
        return True


def run_programs(
    programs: Mapping[int, Program], begin_us: Mapping[int, float] | None = None, contention: Contention = ALONE
) -> dict[int, Host]:
    """The programs of all ranks, run: when each item and each message began and ended.

    Args:
        programs: by rank.
        begin_us: by rank, when it begins; None for 0.
        contention: how work and messages slow each other.
    """
    next_us = dict.fromkeys(programs, 0.0) if begin_us is None else dict(begin_us)
    hosts: dict[int, Host] = {}
    num_started, now = dict[Message, int](), 0.0

    def meet(message: Message) -> None:
        num_started[message] = num_started.get(message, 0) + 1
        if num_started[message] == len(message.transfer_us):
            for rank in message.transfer_us:
                hosts[rank].go_to(now)
                hosts[rank].transfers[message].meet(now)
                next_us[rank] = now

    for rank, order in _orders(programs).items():
        hosts[rank] = Host(rank, programs[rank], next_us[rank], order, meet, contention)
    while next_us and (now := next_us[rank := min(next_us, key=next_us.__getitem__)]) < inf:
        hosts[rank].go_to(now)
        hosts[rank].do_due()
        next_us[rank] = now + hosts[rank].until_change_us()
    return hosts


def _orders(programs: Mapping[int, Program]) -> dict[int, dict[Hashable, list[Message]]]:
    """By rank the messages of each queue in the order of issue, which on all ranks is that of the first to have them.

    A change may move a message by a share of each rank's work, and so past another one on one rank only. Only messages
    of the same ranks keep an order: of what a rank sends to two others, each of them knows its own part alone.
    """
    places: dict[Message, int] = {}
    found: dict[int, dict[Hashable, list[Message]]] = {}
    for rank, items in programs.items():
        sent = [item.message for item in items if isinstance(item, Issue)]
        for message in sent:
            places.setdefault(message, len(places))
        shared: dict[Hashable, list[Message]] = {}
        for message in sorted(sent, key=places.__getitem__, reverse=True):
            shared.setdefault((message.queue, *message.transfer_us), []).append(message)
        found[rank] = {}
        for message in sent:
            one = shared[message.queue, *message.transfer_us].pop() if len(message.transfer_us) > 1 else message
            found[rank].setdefault((one.queue, one.lanes.get(rank, 0)), []).append(one)
    return found


class Piece(NamedTuple):
    """A part of a path: ``work`` of a rank; a message that is ``queued``, moves (its verb), or whose host wakes up."""

    rank: int
    kind: str
    of: Work | Message
    start_us: float
    end_us: float


def path_to_end(hosts: Mapping[int, Host], rank: int) -> Iterator[Piece]:
    """The chain of causes of a rank's end, from there back to the beginning of some rank, without a gap."""
    place = len(hosts[rank].items)
    while place:
        place -= 1
        host = hosts[rank]
        item, (begin_us, end_us) = host.items[place], host.begins_us[place : place + 2]
        if isinstance(item, Work):
            yield Piece(rank, "work", item, begin_us, end_us)
        elif isinstance(item, Wait):
            ended_us = host.transfers[item.message].ended_us
            yield Piece(rank, "wake-up", item.message, max(begin_us, ended_us), end_us)
            if ended_us > begin_us:
                rank, place = yield from _path_to_issue(hosts, rank, item.message)


def _path_to_issue(hosts: Mapping[int, Host], rank: int, message: Message) -> Generator[Piece, None, tuple[int, int]]:
    """The path back from a message's end to where a host issued the one that it depends on: rank, place in program."""
    while True:
        transfer = hosts[rank].transfers[message]
        yield Piece(rank, str(message.op), message, transfer.met_us, transfer.ended_us)
        rank = max(message.transfer_us, key=lambda one: hosts[one].transfers[message].started_us)
        transfer = hosts[rank].transfers[message]
        yield Piece(rank, "queued", message, transfer.ready_us, transfer.started_us)
        causes = [
            one for one in (transfer.before, transfer.after) if one is not None and one.ended_us > transfer.issued_us
        ]
        if not causes:
            return rank, hosts[rank].items.index(Issue(message))
        message = max(causes, key=lambda one: one.ended_us).of
