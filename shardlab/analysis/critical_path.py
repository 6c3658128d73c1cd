"""Why a step took as long as it did: the chain of causes up to its end, and what a faster link would gain.

The critical path is found backwards from the rank that ended last: through the work of its host to the collective it
waited for, to the rank that was last to join that collective, and so on to the beginning. It has no gaps, so its pieces
add up to the step. Only what lies on it is worth making faster. How much that gains before another path becomes the
longest is what ``what_if_free`` says. Both keep compute as recorded; on a CPU, where communication slows compute down,
the gain may be larger.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.causal_graph import Event, Node, causal_graph
from shardlab.analysis.intervals import innermost
from shardlab.analysis.rows import bounds, one_step_of_run
from shardlab.tables import COLLECTIVES, SPANS

RUN = ["run", "source"]
PIECE = ["rank", "kind", "what", "start_us", "end_us"]
ALL = "all collectives"
LATE = "late"
Piece = tuple[int, str, str, float, float]


def critical_path(
    collectives: pd.DataFrame,
    spans: pd.DataFrame,
    *,
    run: str | None = None,
    step: int | None = None,
    axes: Mapping[str, int] | None = None,
) -> pd.DataFrame:
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
    collectives: pd.DataFrame,
    spans: pd.DataFrame,
    tag: str | None = None,
    *,
    run: str | None = None,
    step: int | None = None,
    axes: Mapping[str, int] | None = None,
) -> pd.DataFrame:
    """How much shorter one step would be if some transfers took no time. Ranks still wait for each other.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``.
        tag: tag of the collectives that take no time; None tries each tag, and all of them at once.
        run: which run; None where the tables hold one.
        step: which step; None for the last.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per tag, the largest gain first; none if nothing is communicated: ``run``, ``source``, ``step``,
        ``tag``, ``num_collectives`` (of all ranks), ``step_us``, ``gain_us``, ``gain`` (share of the step). The row for
        all tags at once is named ``ALL``.

    Raises:
        ValueError: see ``critical_path``; or no collective of the step has this tag.
    """
    nodes, _, both = _graph(collectives, spans, run, step, axes)
    tags = [node.tag for node in nodes if node.event is Event.END]
    if tag is not None and tag not in tags:
        raise ValueError(
            f"tag: {tag!r} is not one of {', '.join(sorted(set(tags))) or 'the step, which has no collectives'}"
        )
    begin, end = (extreme(node.time_us for node in nodes) for extreme in (min, max))
    trials = {name: {name} for name in (dict.fromkeys(tags) if tag is None else [tag])}
    if tag is None and tags:
        trials[ALL] = set(tags)
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
        ready = max((times[cause] for cause in node.causes), default=node.time_us)
        is_free = node.event is Event.END and node.tag in free
        times[node] = ready if is_free else ready + node.lasted_us
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
