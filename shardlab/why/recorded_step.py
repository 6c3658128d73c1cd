"""A recorded step as a program of each rank, which can be run again: as it was, or with one thing changed.

A step of a rank is what table ``steps`` says: from ``start_us``, before it takes its first batch, for ``step_us``,
until its parameters are stepped; what reports the loss comes after it. A step is as long as the median of its ranks.

Run again (``partition.step_program``), work takes as long as in the record, and a message as long as it took from when
its last rank had started it. So a changed program says how long the step would have been: with less work, other
messages, other transfers. Work keeps its recorded time, though beside other communication it would be a little slower
or faster. Broadcasts take the time that each rank saw, and so do sends that no tag pairs with a receive.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, concurrent_rows, covered_until, innermost
from shardlab.analysis.matching import matched_collectives, with_group
from shardlab.analysis.rows import begins_of_backward, bounds, numbers, on_streams, one_run, one_step
from shardlab.partition.step_program import Host, Issue, Item, Message, Program, Wait, Work, path_to_end, run_programs
from shardlab.records.tables import COLLECTIVES, SPANS, STEPS
from shardlab.vocabulary import Collective, Phase

Removed = Mapping[int, Intervals]
NOTHING: Intervals = np.empty((0, 2))
REPRODUCED = 0.05  # how far the replay of a step as it was may be from its time
SEEN_US = 1.0  # messages that overlap by less move one after another
ALL, LATE = "all collectives", "late"


class NotReplayedError(ValueError):
    """The record does not say what explains the length of the step."""


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The programs of all ranks.

    Attributes:
        first_us: when the first rank begins, on the axis of the record.
        begin_us: by rank, when it begins, from then on.
        backward_us: by rank, when each of its backwards began, on the axis of the record.
        spans: of all ranks.
    """

    programs: Mapping[int, Program]
    first_us: float
    begin_us: Mapping[int, float]
    backward_us: Mapping[int, tuple[float, ...]]
    spans: pd.DataFrame

    @property
    def us(self) -> float:
        """How long the step takes, the median over the ranks; inf if it cannot end."""
        hosts = run_programs(self.programs, self.begin_us)
        return float(median(hosts[rank].end_us - begin for rank, begin in self.begin_us.items()))

    @property
    def messages(self) -> list[Message]:
        """In the order of issue, rank by rank; each once."""
        issued = (item.message for items in self.programs.values() for item in items if isinstance(item, Issue))
        return list(dict.fromkeys(issued))

    def each(self, change: Callable[[int, Program], Iterator[Item]]) -> "RecordedStep":
        """With another program on each rank, made of its rank and its program."""
        return replace(self, programs={rank: tuple(change(rank, items)) for rank, items in self.programs.items()})

    def with_work(self, us_of: Callable[[int, Work], float]) -> "RecordedStep":
        """With other times of work, each made of a rank and its work."""

        def change(rank: int, items: Program) -> Iterator[Item]:
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

        def change(_: int, items: Program) -> Iterator[Item]:
            for item in items:
                yield item if isinstance(item, Work) else replace(item, message=others[item.message])

        return self.each(change)


def recorded_step(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, *, run: str | None = None,
    step: int | None = None, axes: Mapping[str, int] | None = None,
) -> RecordedStep:  # fmt: skip
    """One step of one run.

    Args:
        collectives, spans, steps: the tables.
        run: which run; None where the tables hold one.
        step: which step; None for the last.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Raises:
        NotReplayedError: see ``recorded_steps``; or run as it was it is more than 5 % off.
        ValueError: columns or times are missing or impossible, there is no such run or step, or the ranks disagree.
    """
    collectives, spans, steps = of_run(collectives, spans, steps, run)
    of_step = steps[steps["step"] == one_step(steps, step)]
    (found,) = recorded_steps(collectives, spans, of_step, axes)
    off = found.us / of_step["step_us"].median() - 1
    if not abs(off) <= REPRODUCED:
        raise NotReplayedError(f"steps: a replay that reproduces the step is missing: it is {100 * off:.3g} % off")
    return found


def of_run(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, run: str | None
) -> Iterator[pd.DataFrame]:
    """Of each table, which is checked, the rows of one run; None names it where the tables hold one.

    Raises:
        ValueError: columns are missing, or there is no such run.
    """
    tables = {COLLECTIVES: collectives, SPANS: spans, STEPS: steps}
    for schema, table in tables.items():
        schema.check(table)
    names = one_run(steps, run)[["run", "source"]].drop_duplicates()
    return (table.merge(names) for table in tables.values())


def critical_path(step: RecordedStep) -> pd.DataFrame:
    """The longest chain of compute and communication through a step, over all ranks.

    It is found backwards from the end of a rank: through the work of its host to the message it waited for, to the rank
    that was last to start that message, and so on. Only what lies on it is worth making faster.

    Returns:
        Its pieces in order of time: ``end_rank``, ``rank``, ``kind``, ``what``, ``start_us``, ``end_us``,
        ``duration_us``. They add up to the step of ``end_rank``, the rank whose step is of median length; of an even
        number there are two in the middle, with a path each. ``kind`` is that of a span (``what`` is its unit;
        ``off_cpu`` where the rank slept or had no core), a collective (its tag; from the moment the last rank joined),
        ``queued`` (issued but not started), ``wake-up`` (it has ended but its rank has not resumed), ``host`` (outside
        all spans) or ``late`` (``end_rank`` had begun the step, and the path's first rank had not).
    """
    hosts = run_programs(step.programs, step.begin_us)
    ranks = sorted(hosts, key=lambda rank: hosts[rank].end_us - step.begin_us[rank])
    middle = sorted(ranks[(len(ranks) - 1) // 2 : len(ranks) // 2 + 1])
    pieces = [(rank, *piece) for rank in middle for piece in _path(step, hosts, rank)]
    table = pd.DataFrame(pieces, columns=["end_rank", "rank", "kind", "what", "start_us", "end_us"])
    table["duration_us"] = table["end_us"] - table["start_us"]
    return table[table["duration_us"] > 0].reset_index(drop=True)


def what_if_free(step: RecordedStep) -> pd.DataFrame:
    """How much shorter a step would be if the transfers of a tag took no time. Ranks still wait for each other.

    Returns:
        One row per tag, the largest gain first; none if nothing is communicated: ``tag``, ``num_collectives`` (of all
        ranks), ``step_us``, ``gain_us``, ``gain`` (share of the step). The row for all tags at once is named ``ALL``.
    """
    step_us, tags = step.us, Counter[str]()
    for one in step.messages:
        tags[one.tag] += len(one.transfer_us)

    def us_without(freed: Collection[str]) -> float:
        return step.with_transfers(lambda one, us: 0.0 if one.tag in freed else us).us

    trials = {tag: [tag] for tag in tags} | ({ALL: list(tags)} if tags else {})
    rows = [(name, sum(tags[tag] for tag in one), step_us, step_us - us_without(one)) for name, one in trials.items()]
    table = pd.DataFrame(rows, columns=["tag", "num_collectives", "step_us", "gain_us"])
    table["gain"] = table["gain_us"] / step_us
    return table.sort_values("gain_us", ascending=False, kind="stable", ignore_index=True)


def _path(step: RecordedStep, hosts: Mapping[int, Host], rank: int) -> Iterator[tuple[int, str, str, float, float]]:
    """The path to the end of a rank, from where that rank began, in order of time and on the axis of the record."""
    begin_us, first_us = step.begin_us[rank], step.first_us
    pieces = [one for one in path_to_end(hosts, rank) if one.end_us > begin_us][::-1]
    yield pieces[0].rank, LATE, "another rank had begun", first_us + begin_us, first_us + pieces[0].start_us
    for one in pieces:
        start, end = first_us + max(begin_us, one.start_us), first_us + one.end_us
        if isinstance(one.of, Message):
            yield one.rank, one.kind, one.of.tag, start, end
        else:
            yield from _host_work(one.rank, start, end, step.spans, first_us + one.start_us - one.of.start_us)


def _host_work(
    rank: int, start: float, end: float, spans: pd.DataFrame, later: float
) -> Iterator[tuple[int, str, str, float, float]]:
    """The innermost spans of a rank between two times, and ``host`` outside them; it ran ``later`` than recorded."""
    times = bounds(spans, "start_us", "end_us", "spans") + later
    near = ((spans["rank"] == rank) & (times[:, 1] > start) & (times[:, 0] < end)).to_numpy()
    pieces, owners = innermost(times[near])
    for (first, last), owner in zip(np.clip(pieces, start, end).tolist(), owners, strict=True):
        yield rank, "host", "", start, first
        row = spans[near].iloc[owner]
        yield rank, str(row["kind"]), str(row["unit"]), first, last
        start = last
    yield rank, "host", "", start, end


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
        NotReplayedError: a stream waited instead of the host, or the record has no waits, or not when steps began.
        ValueError: see ``matched_collectives``.
    """
    rows = collectives[collectives["phase"] != str(Phase.METRICS)]
    rows = rows[rows["step"].isin(steps["step"])].reset_index(drop=True)
    if no_host_waits(rows):
        raise NotReplayedError("collectives: the record has no waits of the host, or a stream waited in its place")
    if steps["start_us"].isna().any():
        raise NotReplayedError("steps: when they began is missing")
    names = matched_collectives(rows, axes) if len(rows) else rows.assign(group="", place=0)
    rows = rows.merge(names[["rank", "step", "seq", "group", "place"]], on=["rank", "step", "seq"], how="left")
    rows = _with_pairs(rows, axes)
    return [_read(*(table[table["step"] == step] for table in (rows, spans, steps))) for step in steps["step"].unique()]


def _with_pairs(rows: pd.DataFrame, axes: Mapping[str, int] | None) -> pd.DataFrame:
    """With sends and receives as one, where a tag names one of each in its group and step, as a pipeline's do."""
    sent = rows[rows["op"].isin([str(Collective.SEND), str(Collective.RECV)])]
    if sent.empty:
        return rows
    every = with_group(rows.drop(columns=["group", "place"]), axes)  # of all ranks, though some may send to nobody
    names = every.loc[sent.index].reset_index(drop=True)
    ops = names.groupby(["step", "axis", "group", "tag"])["op"]
    is_pair = ((ops.transform("nunique") == 2) & (ops.transform("size") == 2)).to_numpy()
    paired, labels = sent.index[is_pair], names["group"] + " " + names["tag"].astype("string")
    rows = rows.assign(group=rows["group"].astype("string"))
    rows.loc[paired, "group"] = labels[is_pair].to_numpy()
    rows.loc[paired, "place"] = 0
    return rows


def no_host_waits(collectives: pd.DataFrame) -> bool:
    """Whether a stream waited instead of the host, or the record has no waits."""
    waits = collectives["wait_start_us"]
    return bool(len(collectives)) and (bool(on_streams(collectives).any()) or bool(waits.isna().all()))


def _read(rows: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame) -> RecordedStep:
    begins = dict(zip(steps["rank"].astype(int), numbers(steps, "start_us").tolist(), strict=True))
    ends = dict(zip(steps["rank"].astype(int), (numbers(steps, "start_us") + numbers(steps, "step_us")), strict=True))
    # What a script sends between two steps is no part of either.
    is_later = numbers(rows, "end_us") > rows["rank"].map(begins).to_numpy(dtype=np.float64)
    rows = rows[is_later & (numbers(rows, "issue_us") < rows["rank"].map(ends).to_numpy(dtype=np.float64))]
    messages = _messages(rows)
    programs = {}
    for rank, begin in begins.items():
        mine = [(row, messages[rank, int(row.seq)]) for row in _each(rows[rows["rank"] == rank])]
        programs[rank] = tuple(_program(mine, begin, float(ends[rank])))
    first = min(begins.values())
    backward_us = {rank: tuple(begins_of_backward(own).tolist()) for rank, own in by_rank(spans).items()}
    return RecordedStep(programs, first, {rank: begin - first for rank, begin in begins.items()}, backward_us, spans)


def _each(rows: pd.DataFrame) -> Iterator[Any]:
    yield from rows.itertuples()


def _messages(rows: pd.DataFrame) -> dict[tuple[int, int], Message]:
    """By rank and place in the record."""
    groups: dict[tuple[object, ...], list[Any]] = {}
    for row in _each(rows):
        key = (row.rank, row.seq) if pd.isna(row.group) else (row.axis, row.group, row.place)
        groups.setdefault(key, []).append(row)
    lane_of, found = _lanes(rows), dict[tuple[int, int], Message]()
    dispatch = _dispatched(rows, lane_of)
    for own in groups.values():
        last, first, op = max(row.start_us for row in own), own[0], Collective(own[0].op)
        pair = [row for row in own if row.op == Collective.SEND] if len(own) == 2 else []
        # A message of two ranks waits for none of another pair.
        queue = f"{first.axis} from {pair[0].rank}" if pair else str(first.axis)
        message = Message(
            op, str(first.tag), Phase(first.phase), int(first.bytes), (queue, bool(pair) or op == Collective.SEND),
            {int(row.rank): max(0.0, row.end_us - last) for row in own},
            {int(row.rank): dispatch[row.rank, row.seq] for row in own}, int(first.group_size),
            lanes={int(row.rank): lane_of[row.rank, row.seq] for row in own},
        )  # fmt: skip
        found |= {(int(row.rank), int(row.seq)): message for row in own}
    return found


def _lanes(rows: pd.DataFrame) -> dict[tuple[int, int], int]:
    """By rank and place in the record, in which lane of its queue a message moved: torch's groups may have several."""
    found = dict[tuple[int, int], int]()
    for _, own in rows.groupby(["rank", "axis", rows["op"] == str(Collective.SEND)]):
        starts = numbers(own, "start_us")
        lanes = concurrent_rows(np.column_stack((starts, np.maximum(starts, numbers(own, "end_us") - SEEN_US))))
        found |= zip(zip(own["rank"], own["seq"], strict=True), lanes.tolist(), strict=True)
    return found


def _dispatched(rows: pd.DataFrame, lane_of: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], float]:
    """How long each message could have started before it did."""
    found, free = {}, dict[tuple[object, ...], float]()
    for row in _each(rows.sort_values("issue_us", kind="stable")):
        queue = row.rank, row.axis, row.op == Collective.SEND, lane_of[row.rank, row.seq]
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
        yield Work(max(0.0, first - now), now, max(now, first))
        yield item
        now = max(now, last)
    yield Work(max(0.0, end - now), now, max(now, end))
