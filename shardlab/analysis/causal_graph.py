"""One recorded step as a graph of causes: what had to have happened before what, and how long each thing took then.

===========  ==================================================  ==========================
node         happens when the last of these has happened         and this has passed
===========  ==================================================  ==========================
host         the rank's host did what came before                compute, or anything else
start        the collective was issued; its lane was free        dispatch
end          every rank of the group has started it              transfer
resumed      the host waits for it, and it has ended             wake-up
===========  ==================================================  ==========================

The passing times are those of the record. So the graph gives back the recorded times, and others when something takes
less. It is about records in which the host waits (gloo); where a stream waits in its place (NCCL) the host's waits say
nothing, and the step is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import TopologicalSorter

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals
from shardlab.analysis.matching import SAME, matched_collectives
from shardlab.analysis.rows import bounds, numbers
from shardlab.vocabulary import Collective, Phase

SEEN_US = 1.0  # a host that waited has seen the end within this time, or it did not wait
TIMES = ("issue_us", "start_us", "end_us", "wait_start_us", "wait_end_us")


class NoHostWaitsError(ValueError):
    """The host did not wait for the collectives, so what it did does not explain the step."""


class Happening(StrEnum):
    """What a node is."""

    HOST = "host"
    START = "start"
    END = "end"
    RESUMED = "resumed"


@dataclass(eq=False, slots=True)
class Node:
    """Something that happened on a rank at ``time_us``; ``op`` and ``tag`` name the collective, if it is about one."""

    happening: Happening
    rank: int
    time_us: float
    op: str = ""
    tag: str = ""
    causes: list["Node"] = field(default_factory=list)

    @property
    def ready_us(self) -> float:
        """When the last of its causes had happened; the first thing on a rank has none."""
        return max((cause.time_us for cause in self.causes), default=self.time_us)

    @property
    def lasted_us(self) -> float:
        """From then until it happened itself."""
        return self.time_us - self.ready_us


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective on one rank; ``wait`` and ``resumed`` only where the host waited for it."""

    lane: tuple[str, bool]
    issue: Node
    start: Node
    end: Node
    waits: tuple[Node, Node] | None


def causal_graph(
    collectives: pd.DataFrame, spans: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> tuple[Node, ...]:
    """The nodes of one step, causes before effects.

    Args:
        collectives: the rows of one run and step; those of the report's own loss are left out.
        spans: likewise; with the first of a rank its step begins, and with the last it ends.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Raises:
        NoHostWaitsError: a stream waited, or the record does not tell of waits.
        ValueError: times are missing or cannot be true, or the ranks disagree (see ``matched_collectives``).
    """
    rows = collectives[collectives["phase"] != str(Phase.METRICS)].reset_index(drop=True)
    calls = _calls(rows)
    if calls and all(call.waits is None for call in calls):
        raise NoHostWaitsError("collectives: nobody waited for any of them in this record, so it does not say why")
    _meet(rows, calls, axes)
    times = bounds(spans, "start_us", "end_us", "spans")
    finishes = []
    for rank in sorted({int(rank) for rank in [*spans["rank"], *rows["rank"]]}):
        own = [call for call in calls if call.end.rank == rank]
        _queue(own)
        finishes.append(_host(rank, own, times[(spans["rank"] == rank).to_numpy(dtype=np.bool_)]))
    return _in_order(finishes)


def _calls(rows: pd.DataFrame) -> list[_Call]:
    """The calls of all rows, in their order, each linked in itself: issued, started, ended."""
    bounds(rows, "issue_us", "start_us", "collectives")
    bounds(rows, "start_us", "end_us", "collectives")
    waited = rows["wait_start_us"].notna()
    bounds(rows[waited], "wait_start_us", "wait_end_us", "collectives")
    times = np.column_stack([numbers(rows, name) for name in TIMES])
    names = zip(rows["rank"].astype(int), rows["axis"].astype(str), rows["op"].astype(str), rows["tag"], strict=True)
    return [_call(rank, axis, (op, str(tag)), *own) for (rank, axis, op, tag), own in zip(names, times, strict=True)]


def _call(rank: int, axis: str, what: tuple[str, str], issue: float, start: float, end: float, *wait: float) -> _Call:
    issued = Node(Happening.HOST, rank, issue, *what)
    started = Node(Happening.START, rank, start, *what, causes=[issued])
    ended = Node(Happening.END, rank, end, *what, causes=[started])
    lane = axis, what[0] == Collective.SEND  # sends have a lane of their own
    if np.isnan(wait[0]):
        return _Call(lane, issued, started, ended, None)
    if wait[1] < end - SEEN_US:
        raise NoHostWaitsError(
            f"collectives: rank {rank} went on {end - wait[1]:.0f} us before {what[0]} {what[1]!r} had ended: a stream "
            "waited and not the host, so what the host did does not say why the step took as long as it did"
        )
    waits = Node(Happening.HOST, rank, wait[0], *what)
    return _Call(lane, issued, started, ended, (waits, Node(Happening.RESUMED, rank, wait[1], *what, [waits, ended])))


def _meet(rows: pd.DataFrame, calls: list[_Call], axes: Mapping[str, int] | None) -> None:
    """No rank has the result before the last has started."""
    if not len(rows):
        return
    call_of = dict(zip(zip(rows["rank"], rows["seq"], strict=True), calls, strict=True))
    for _, members in matched_collectives(rows, axes).groupby(SAME, sort=False)[["rank", "seq"]]:
        own = [call_of[key] for key in members.itertuples(index=False, name=None)]
        for call in own:
            # (clocks may differ a little: what seems to start after the end cannot have been waited for)
            call.end.causes = [other.start for other in own if other.start.time_us <= call.end.time_us]


def _queue(calls: list[_Call]) -> None:
    """A lane takes one call after another, in the order of issue."""
    last: dict[tuple[str, bool], _Call] = {}
    for call in sorted(calls, key=lambda call: call.issue.time_us):
        before = last.get(call.lane)
        if before is not None and before.end.time_us <= call.start.time_us:
            call.start.causes.append(before.end)
        last[call.lane] = call


def _host(rank: int, calls: list[_Call], compute: Intervals) -> Node:
    """What the host did in its order, from the begin of the step to its end, which is returned."""
    marks = [(call.issue, call.issue) for call in calls] + [call.waits for call in calls if call.waits is not None]
    marks.sort(key=lambda mark: (mark[0].time_us, mark[1].time_us))
    begin = min([*compute[:, 0], *(mark[0].time_us for mark in marks[:1])])
    end = max([*compute[:, 1], *(mark[1].time_us for mark in marks[-1:])])
    now = Node(Happening.HOST, rank, begin)
    for first, last in [*marks, (finish := Node(Happening.HOST, rank, end), finish)]:
        if first.time_us < now.time_us:
            raise ValueError(
                f"collectives: rank {rank} came to {first.op} {first.tag!r} {now.time_us - first.time_us:.0f} us "
                f"before it went on from {now.op} {now.tag!r}: not the doings of one thread"
            )
        first.causes.append(now)
        now = last
    return finish


def _in_order(finishes: list[Node]) -> tuple[Node, ...]:
    graph: dict[Node, list[Node]] = {}
    left = list(finishes)
    while left:
        node = left.pop()
        if node not in graph:
            graph[node] = node.causes
            left += node.causes
    return tuple(TopologicalSorter(graph).static_order())
