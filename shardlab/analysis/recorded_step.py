"""A recorded step as a program of each rank, which can be run again: as it was, or with one thing changed.

A rank's program is what its host did, in order: work, issue a message, wait for one. Run again, work takes as long as
in the record. A message starts on a rank when it has been issued and the one before it in its queue has ended; it
begins to move when the last rank has started it, and then takes as long as it took. So a changed program says how long
the step would have been: with less work, other messages, other transfers. Work keeps its recorded time, though beside
other communication it would be a little slower or faster. Broadcasts and sends take the time that each rank saw.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.critical_path import NoHostWaitsError
from shardlab.analysis.intervals import Intervals, covered_until
from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.repeated_reductions import begins_of_backward
from shardlab.analysis.rows import numbers, on_streams
from shardlab.vocabulary import Collective, MeshAxis, Phase

Removed = Mapping[int, Intervals]
NOTHING: Intervals = np.empty((0, 2))


@dataclass(frozen=True, eq=False)
class Message:
    """One collective on all its ranks.

    Attributes:
        queue: messages of one queue travel one after another.
        transfer_us: by rank, from the moment its last rank has started it until it has ended there.
        dispatch_us: by rank, from the moment it could start until it did.
    """

    op: Collective
    tag: str
    phase: Phase
    num_bytes: int
    group_size: int
    queue: tuple[str, bool]
    transfer_us: Mapping[int, float]
    dispatch_us: Mapping[int, float]

    @property
    def is_inside(self) -> bool:
        """Whether it is between two operations of a divided model, so that no other order or size is to be had."""
        return self.queue[0] == MeshAxis.TENSOR


@dataclass(frozen=True)
class Work:
    """The host does anything but wait; ``us`` is how long it takes, and the times are those of the record."""

    start_us: float
    end_us: float
    us: float

    def cut(self, share: float) -> tuple["Work", "Work"]:
        """The first ``share`` of it and the rest."""
        middle, us = self.start_us + share * (self.end_us - self.start_us), share * self.us
        return Work(self.start_us, middle, us), Work(middle, self.end_us, self.us - us)


@dataclass(frozen=True)
class Issue:
    """The host hands a message to its queue."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """The host waits for a message, and goes on ``wake_us`` after it has ended."""

    message: Message
    wake_us: float


Item = Work | Issue | Wait


@dataclass(frozen=True)
class RecordedStep:
    """The programs of all ranks.

    Attributes:
        begin_us: by rank, when it begins, from the first rank on.
        backward_us: by rank, when each of its backwards began, on the axis of the record.
    """

    programs: Mapping[int, tuple[Item, ...]]
    begin_us: Mapping[int, float]
    backward_us: Mapping[int, tuple[float, ...]]

    @property
    def us(self) -> float:
        """How long the step takes, the median over the ranks; inf if it cannot end."""
        ends = _run(self)
        return float(median(ends[rank] - begin for rank, begin in self.begin_us.items()))

    @property
    def messages(self) -> list[Message]:
        """In the order of issue, rank by rank; each once."""
        issued = (item.message for items in self.programs.values() for item in items if isinstance(item, Issue))
        return list(dict.fromkeys(issued))

    def each(self, change: Callable[[int, tuple[Item, ...]], Iterator[Item]]) -> "RecordedStep":
        """With another program on each rank, made of its rank and its program."""
        return replace(self, programs={rank: tuple(change(rank, items)) for rank, items in self.programs.items()})

    def with_work(self, us_of: Callable[[int, Work], float]) -> "RecordedStep":
        """With other times of work, each made of a rank and its work."""

        def change(rank: int, items: tuple[Item, ...]) -> Iterator[Item]:
            for item in items:
                yield replace(item, us=us_of(rank, item)) if isinstance(item, Work) else item

        return self.each(change)

    def without(self, removed: Removed) -> "RecordedStep":
        """Without the work that lies in some intervals of each rank."""
        gone: dict[tuple[int, Work], float] = {}
        for rank, times in removed.items():
            work = [item for item in self.programs[rank] if isinstance(item, Work)]
            moments = np.array([(item.start_us, item.end_us) for item in work])
            gone |= zip(((rank, item) for item in work), np.diff(covered_until(times, moments)).ravel(), strict=True)

        def left(rank: int, work: Work) -> float:
            return max(0.0, work.us - gone.get((rank, work), 0.0))

        return self.with_work(left)

    def with_transfers(self, us_of: Callable[[Message, float], float]) -> "RecordedStep":
        """With other times of transfer, each made of a message and its time."""

        def change(one: Message) -> Message:
            return replace(one, transfer_us={rank: max(0.0, us_of(one, us)) for rank, us in one.transfer_us.items()})

        return self.with_messages(change)

    def without_messages(self, gone: Collection[Message]) -> "RecordedStep":
        """With some messages neither issued nor waited for."""
        return self.each(lambda _, items: (one for one in items if isinstance(one, Work) or one.message not in gone))

    def with_messages(self, changed: Callable[[Message], Message]) -> "RecordedStep":
        """With other messages in the place of these."""
        others = {one: changed(one) for one in self.messages}

        def change(_: int, items: tuple[Item, ...]) -> Iterator[Item]:
            for item in items:
                yield item if isinstance(item, Work) else replace(item, message=others[item.message])

        return self.each(change)


def by_rank(frame: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The rows of each rank."""
    return {int(str(rank)): own for rank, own in frame.groupby("rank")}


def recorded_steps(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> list[RecordedStep]:
    """The programs of one run's steps.

    Args:
        collectives: of that run, all ranks; the reported loss is left out, since a step ends before it.
        spans: likewise.
        steps: of that run: those to read.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Raises:
        NoHostWaitsError: a stream waited instead of the host, or the record has no waits.
        ValueError: see ``matched_collectives``.
    """
    rows = collectives[collectives["phase"] != str(Phase.METRICS)]
    rows = rows[rows["step"].isin(steps["step"])].reset_index(drop=True)
    if no_host_waits(rows):
        raise NoHostWaitsError("collectives: the record has no waits of the host")
    names = matched_collectives(rows, axes) if len(rows) else rows.assign(group="", place=0)
    rows = rows.merge(names[["rank", "step", "seq", "group", "place"]], on=["rank", "step", "seq"], how="left")
    return [_read(*(table[table["step"] == step] for table in (rows, spans, steps))) for step in steps["step"].unique()]


def no_host_waits(collectives: pd.DataFrame) -> bool:
    """Whether a stream waited instead of the host, or the record has no waits."""
    waits = collectives["wait_start_us"]
    return bool(len(collectives)) and (bool(on_streams(collectives).any()) or bool(waits.isna().all()))


def _read(rows: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame) -> RecordedStep:
    begins = dict(zip(steps["rank"].astype(int), numbers(steps, "start_us").tolist(), strict=True))
    ends = dict(zip(steps["rank"].astype(int), (numbers(steps, "start_us") + numbers(steps, "step_us")), strict=True))
    rows = rows[numbers(rows, "issue_us") < rows["rank"].map(ends).to_numpy(dtype=np.float64)]
    messages = _messages(rows)
    programs = {}
    for rank, begin in begins.items():
        mine: list[tuple[Any, Message]] = [
            (row, messages[rank, int(row.seq)]) for row in _each(rows[rows["rank"] == rank])
        ]
        programs[rank] = tuple(_program(mine, begin, float(ends[rank])))
    first = min(begins.values())
    backward_us = {rank: tuple(begins_of_backward(own).tolist()) for rank, own in by_rank(spans).items()}
    return RecordedStep(programs, {rank: begin - first for rank, begin in begins.items()}, backward_us)


def _each(rows: pd.DataFrame) -> Iterator[Any]:
    yield from rows.itertuples()


def _messages(rows: pd.DataFrame) -> dict[tuple[int, int], Message]:
    """By rank and place in the record."""
    groups: dict[tuple[object, ...], list[Any]] = {}
    for row in _each(rows):
        key = (row.rank, row.seq) if pd.isna(row.group) else (row.axis, row.group, row.place)
        groups.setdefault(key, []).append(row)
    dispatch, found = _dispatched(rows), dict[tuple[int, int], Message]()
    for own in groups.values():
        last, first, op = max(row.start_us for row in own), own[0], Collective(own[0].op)
        message = Message(
            op, str(first.tag), Phase(first.phase), int(first.bytes), int(first.group_size),
            (str(first.axis), op == Collective.SEND),
            {int(row.rank): max(0.0, row.end_us - last) for row in own},
            {int(row.rank): dispatch[row.rank, row.seq] for row in own},
        )  # fmt: skip
        found |= {(int(row.rank), int(row.seq)): message for row in own}
    return found


def _dispatched(rows: pd.DataFrame) -> dict[tuple[int, int], float]:
    """How long each message could have started before it did."""
    found, free = {}, dict[tuple[int, str, bool], float]()
    for row in _each(rows.sort_values("issue_us", kind="stable")):
        queue = row.rank, row.axis, row.op == Collective.SEND
        found[row.rank, row.seq] = max(0.0, row.start_us - max(row.issue_us, free.get(queue, 0.0)))
        free[queue] = row.end_us
    return found


def _program(mine: list[tuple[Any, Message]], begin: float, end: float) -> Iterator[Item]:
    marks: list[tuple[float, float, Item]] = []
    for row, message in mine:
        marks.append((row.issue_us, row.issue_us, Issue(message)))
        if row.wait_start_us < end:  # not NaN, where nobody waited
            wake_us = max(0.0, row.wait_end_us - max(row.wait_start_us, row.end_us))
            marks.append((row.wait_start_us, row.wait_end_us, Wait(message, wake_us)))
    now = begin
    for first, last, item in sorted(marks, key=lambda mark: mark[:2]):
        yield Work(now, max(now, first), max(0.0, first - now))
        yield item
        now = max(now, last)
    yield Work(now, max(now, end), max(0.0, end - now))


def _run(step: RecordedStep) -> dict[int, float]:
    """When each rank ends; never, if ranks wait for each other."""
    now, left = dict(step.begin_us), {rank: deque(items) for rank, items in step.programs.items()}
    queues, free = _queues(step), dict[tuple[int, object], float]()
    issued: dict[tuple[int, Message], float] = {}
    started: dict[Message, dict[int, float]] = {}
    moves: dict[Message, float] = {}  # from when on
    going = True
    while going:
        going = False
        for rank, items in left.items():
            while items and not (isinstance(items[0], Wait) and items[0].message not in moves):
                going, item = True, items.popleft()
                if isinstance(item, Work):
                    now[rank] += item.us
                elif isinstance(item, Issue):
                    issued[rank, item.message] = now[rank]
                else:
                    ended = moves[item.message] + item.message.transfer_us[rank]
                    now[rank] = max(now[rank], ended) + item.wake_us
        for (rank, queue), waiting in queues.items():
            while waiting and waiting[0] in moves:
                message = waiting.popleft()
                free[rank, queue] = moves[message] + message.transfer_us[rank]
            if waiting and (rank, message := waiting[0]) in issued and rank not in started.setdefault(message, {}):
                going, could = True, max(issued[rank, message], free.get((rank, queue), 0.0))
                started[message][rank] = could + message.dispatch_us[rank]
                if len(started[message]) == len(message.transfer_us):
                    moves[message] = max(started[message].values())
    return dict.fromkeys(now, inf) if any(left.values()) else now


def _queues(step: RecordedStep) -> dict[tuple[int, object], deque[Message]]:
    """The messages of each queue in the order of issue, which on all ranks is that of the first rank to have them.

    A change may move a message by a share of each rank's work, and so past another one on one rank only.
    """
    places: dict[Message, int] = {}
    found: dict[tuple[int, object], deque[Message]] = {}
    for rank, items in step.programs.items():
        sent = [item.message for item in items if isinstance(item, Issue)]
        for message in sent:
            places.setdefault(message, len(places))
        shared = iter(sorted((one for one in sent if len(one.transfer_us) > 1), key=lambda one: places[one]))
        for message in sent:
            one = next(shared) if len(message.transfer_us) > 1 else message
            found.setdefault((rank, one.queue), deque()).append(one)
    return found
