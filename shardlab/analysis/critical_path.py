"""Why a step took as long as it did: the chain of causes up to its end, and what a faster link would gain.

The critical path is found backwards from the rank that ended last: through the work of its host to the collective it
waited for, to the rank that was last to join that collective, and so on to the beginning. It has no gaps, so its pieces
add up to the step. Only what lies on it is worth making faster. How much that gains before another path becomes the
longest is what ``what_if_free`` says. Both keep compute as recorded; on a CPU, where communication slows compute down,
the gain may be larger.

Its base is the step as a causal graph: what had to happen before what, and how long each event then took.

===========  ==================================================  ==========================
node         happens when the last of these has happened         and this has passed
===========  ==================================================  ==========================
host         the rank's host has done what came before            compute, or anything else
start        the collective was issued and its queue was free     dispatch
end          every rank of the group has started it              transfer
resumed      the host waits for it, and it has ended             wake-up
===========  ==================================================  ==========================

The times that pass are those of the record. So the graph reproduces the recorded times, and says how they change if
something takes less. It needs records in which the host waits, of ranks on the CPU. On a GPU a stream waits, while the
host issues ahead of it; such a step is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import TopologicalSorter

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import Intervals, innermost
from shardlab.analysis.matching import SAME, matched_collectives
from shardlab.analysis.rows import bounds, numbers, on_streams, one_step_of_run
from shardlab.tables import COLLECTIVES, SPANS
from shardlab.vocabulary import Collective, Phase

RUN = ["run", "source"]
PIECE = ["rank", "kind", "what", "start_us", "end_us"]
ALL = "all collectives"
LATE = "late"
Piece = tuple[int, str, str, float, float]
SEEN_US = 1.0  # a host that resumes earlier than this before the end did not really wait
TIMES = ("issue_us", "start_us", "end_us", "wait_start_us", "wait_end_us")


class NoHostWaitsError(ValueError):
    """The host did not wait for the collectives, so its work does not explain the length of the step."""


class Event(StrEnum):
    """What happens at a node."""

    HOST = "host"
    START = "start"
    END = "end"
    RESUMED = "resumed"


@dataclass(eq=False, slots=True)
class Node:
    """An event on a rank at ``time_us``; ``op`` and ``tag`` name its collective, if it has one."""

    event: Event
    rank: int
    time_us: float
    op: str = ""
    tag: str = ""
    causes: list["Node"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective on one rank; ``waits`` (from when, until when) only if the host waited for it."""

    queue: tuple[str, bool]
    issue: Node
    start: Node
    end: Node
    waits: tuple[Node, Node] | None


def critical_path(
    collectives: pd.DataFrame, spans: pd.DataFrame, *, run: str | None = None, step: int | None = None,
    axes: Mapping[str, int] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """The longest chain of compute and communication through one step, over all ranks.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``.
        run: which run; None where the tables hold one.
        step: which step; None for the last.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        Its pieces in order of time: ``run``, ``source``, ``step``, ``rank``, ``kind``, ``what``,
        ``start_us``, ``end_us``, ``duration_us``. ``kind`` is that of a span (``what`` is its unit; ``off_cpu`` where
        the rank slept or had no core), a collective (its tag; from the moment the last rank joined), ``queued`` (issued
        but not started), ``wake-up`` (it has ended but its rank has not resumed), ``host`` (outside all spans) or
        ``late`` (another rank had begun the step, but the first rank of the path had not). They add up to the step.

    Raises:
        ValueError: columns or times are missing or impossible, there is no such run or step, the ranks disagree, or a
            stream waited instead of the host.
    """
    nodes, worked, both = _graph(collectives, spans, run, step, axes)
    pieces = [piece for piece in _walk(nodes, worked) if piece[4] > piece[3]]
    table = pd.DataFrame(pieces, columns=PIECE)
    for column in ("step", "source", "run"):
        table.insert(0, column, both[column].iloc[0])
    return table.assign(duration_us=table["end_us"] - table["start_us"])


def what_if_free(
    collectives: pd.DataFrame, spans: pd.DataFrame, *, run: str | None = None, step: int | None = None,
    axes: Mapping[str, int] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """How much shorter one step would be if the transfers of a tag took no time. Ranks still wait for each other.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``.
        run: which run; None where the tables hold one.
        step: which step; None for the last.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per tag, the largest gain first; none if nothing is communicated: ``run``, ``source``, ``step``,
        ``tag``, ``num_collectives`` (of all ranks), ``step_us``, ``gain_us``, ``gain`` (share of the step). The row for
        all tags at once is named ``ALL``.

    Raises:
        ValueError: see ``critical_path``.
    """
    nodes, _, both = _graph(collectives, spans, run, step, axes)
    tags = [node.tag for node in nodes if node.event is Event.END]
    begin, end = (extreme(node.time_us for node in nodes) for extreme in (min, max))
    trials = {tag: {tag} for tag in tags} | ({ALL: set(tags)} if tags else {})
    of_step = both[[*RUN, "step"]].iloc[0]
    rows = [
        (*of_step, name, sum(one in freed for one in tags), end - begin, end - _end_without(nodes, freed))
        for name, freed in trials.items()
    ]
    table = pd.DataFrame(rows, columns=[*RUN, "step", "tag", "num_collectives", "step_us", "gain_us"])
    table["gain"] = table["gain_us"] / table["step_us"]
    return table.sort_values("gain_us", ascending=False, kind="stable", ignore_index=True)


def _graph(
    collectives: pd.DataFrame, spans: pd.DataFrame, run: str | None, step: int | None, axes: Mapping[str, int] | None
) -> tuple[tuple[Node, ...], pd.DataFrame, pd.DataFrame]:
    """The nodes of one step of one run, its spans, and where its rows are from."""
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    moved, worked, both = one_step_of_run(collectives, spans, run, step)
    return causal_graph(moved, worked, axes), worked, both


def _end_without(nodes: tuple[Node, ...], free: set[str]) -> float:
    """When the step would end if transfers with these tags took no time."""
    times: dict[Node, float] = {}
    for node in nodes:
        # The first event on a rank has no causes.
        was_ready = max((cause.time_us for cause in node.causes), default=node.time_us)
        ready = max((times[cause] for cause in node.causes), default=node.time_us)
        is_free = node.event is Event.END and node.tag in free
        times[node] = ready if is_free else ready + (node.time_us - was_ready)
    return max(times.values())


def _walk(nodes: tuple[Node, ...], spans: pd.DataFrame) -> list[Piece]:
    """The path from the last node back to a beginning, in order of time."""
    node = max(nodes, key=lambda node: node.time_us)
    begin_us = min(node.time_us for node in nodes)
    found: list[Piece] = []
    while node.causes:
        cause = max(node.causes, key=lambda cause: cause.time_us)
        found += reversed(list(_between(cause, node, spans)))
        node = cause
    return [(node.rank, LATE, "another rank had begun", begin_us, node.time_us), *found[::-1]]


def _between(cause: Node, node: Node, spans: pd.DataFrame) -> Iterator[Piece]:
    """The pieces between a cause and its effect."""
    start, end = cause.time_us, node.time_us
    if node.event is Event.HOST:
        yield from _host_work(node.rank, start, end, spans)
        return
    kinds = {Event.START: "queued", Event.END: node.op, Event.RESUMED: "wake-up"}
    yield node.rank, kinds[node.event], node.tag, start, end


def _host_work(rank: int, start: float, end: float, spans: pd.DataFrame) -> Iterator[Piece]:
    """The innermost spans of a rank between two times, and ``host`` for the time outside them."""
    near = spans[(spans["rank"] == rank) & (spans["end_us"] > start) & (spans["start_us"] < end)]
    pieces, owners = innermost(bounds(near, "start_us", "end_us", "spans"))
    for (first, last), owner in zip(np.clip(pieces, start, end).tolist(), owners, strict=True):
        yield rank, "host", "", start, first
        row = near.iloc[owner]
        yield rank, str(row["kind"]), str(row["unit"]), first, last
        start = last
    yield rank, "host", "", start, end


def causal_graph(
    collectives: pd.DataFrame, spans: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> tuple[Node, ...]:
    """The nodes of one step, causes before effects.

    Args:
        collectives: the rows of one run and step; the reported loss is left out.
        spans: likewise; a rank's step lasts from its first span to its last.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Raises:
        NoHostWaitsError: a stream waited instead of the host, or the record has no waits.
        ValueError: times are missing or impossible, or the ranks disagree (see ``matched_collectives``).
    """
    rows = collectives[collectives["phase"] != str(Phase.METRICS)].reset_index(drop=True)
    if on_streams(rows).any():
        raise NoHostWaitsError(
            f"collectives: those over {rows['transport'].iloc[0]} are waited for by a stream, not by the host, whose "
            "work does not explain the length of the step; record ranks on the CPU"
        )
    calls = _calls(rows)
    if calls and all(call.waits is None for call in calls):
        raise NoHostWaitsError(
            "collectives: the record has no waits of the host, so it cannot explain the length of the step"
        )
    _meet(rows, calls, axes)
    times = bounds(spans, "start_us", "end_us", "spans")
    finishes = []
    for rank in sorted({int(rank) for rank in [*spans["rank"], *rows["rank"]]}):
        own = [call for call in calls if call.end.rank == rank]
        _queue(own)
        finishes.append(_host(rank, own, times[(spans["rank"] == rank).to_numpy(dtype=np.bool_)]))
    return _in_order(finishes)


def _calls(rows: pd.DataFrame) -> list[_Call]:
    """A call for each row, its own events linked: issued, started, ended, waited for."""
    bounds(rows, "issue_us", "start_us", "collectives")
    bounds(rows, "start_us", "end_us", "collectives")
    waited = rows["wait_start_us"].notna()
    bounds(rows[waited], "wait_start_us", "wait_end_us", "collectives")
    times = np.column_stack([numbers(rows, name) for name in TIMES])
    names = zip(rows["rank"].astype(int), rows["axis"].astype(str), rows["op"].astype(str), rows["tag"], strict=True)
    return [_call(rank, axis, (op, str(tag)), *own) for (rank, axis, op, tag), own in zip(names, times, strict=True)]


def _call(rank: int, axis: str, what: tuple[str, str], issue: float, start: float, end: float, *wait: float) -> _Call:
    issued = Node(Event.HOST, rank, issue, *what)
    started = Node(Event.START, rank, start, *what, causes=[issued])
    ended = Node(Event.END, rank, end, *what, causes=[started])
    queue = axis, what[0] == Collective.SEND  # sends have a queue of their own
    if np.isnan(wait[0]):
        return _Call(queue, issued, started, ended, None)
    if wait[1] < end - SEEN_US:
        raise NoHostWaitsError(
            f"collectives: rank {rank} resumed {end - wait[1]:.0f} us before {what[0]} {what[1]!r} ended: a stream "
            "waited instead of the host, so the host's work does not explain the length of the step"
        )
    waits = Node(Event.HOST, rank, wait[0], *what)
    return _Call(queue, issued, started, ended, (waits, Node(Event.RESUMED, rank, wait[1], *what, [waits, ended])))


def _meet(rows: pd.DataFrame, calls: list[_Call], axes: Mapping[str, int] | None) -> None:
    """A collective ends on no rank before every rank has started it."""
    if not len(rows):
        return
    call_of = dict(zip(zip(rows["rank"], rows["seq"], strict=True), calls, strict=True))
    for _, members in matched_collectives(rows, axes).groupby(SAME, sort=False)[["rank", "seq"]]:
        own = [call_of[key] for key in members.itertuples(index=False, name=None)]
        for call in own:
            # Clocks differ a little. A start that seems to come after the end would make the graph cyclic.
            call.end.causes = [other.start for other in own if other.start.time_us <= call.end.time_us]


def _queue(calls: list[_Call]) -> None:
    """A queue runs one call after another, in the order of issue."""
    last: dict[tuple[str, bool], _Call] = {}
    for call in sorted(calls, key=lambda call: call.issue.time_us):
        before = last.get(call.queue)
        if before is not None and before.end.time_us <= call.start.time_us:
            call.start.causes.append(before.end)
        last[call.queue] = call


def _host(rank: int, calls: list[_Call], compute: Intervals) -> Node:
    """Chain the host's events from the beginning of the step to its end; return the end."""
    marks = [(call.issue, call.issue) for call in calls] + [call.waits for call in calls if call.waits is not None]
    marks.sort(key=lambda mark: (mark[0].time_us, mark[1].time_us))
    begin = min([*compute[:, 0], *(mark[0].time_us for mark in marks[:1])])
    end = max([*compute[:, 1], *(mark[1].time_us for mark in marks[-1:])])
    now = Node(Event.HOST, rank, begin)
    for first, last in [*marks, (finish := Node(Event.HOST, rank, end), finish)]:
        if first.time_us < now.time_us:
            raise ValueError(
                f"collectives: rank {rank} reached {first.op} {first.tag!r} {now.time_us - first.time_us:.0f} us "
                f"before it had finished {now.op} {now.tag!r}: one thread cannot have done both"
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
