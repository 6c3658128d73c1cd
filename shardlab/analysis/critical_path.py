"""Why a step took as long as it did: the chain of causes that ends with its end, and what breaking it would gain.

The critical path runs backwards from the rank that ended last: through what its host did, to the collective it waited
for, to the rank that came last to that collective, and so on to the begin. It has no gaps: its pieces add up to the
step. Only what lies on it is worth making faster, and by how much another path then takes over is what
``what_if_free`` says. Both take compute as it was: on a CPU, where communication takes time from compute, more may be
gained.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from shardlab.analysis.causal_graph import Happening, Node, causal_graph
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
        Its pieces in order of time, without gaps: ``run``, ``source``, ``step``, ``rank``, ``kind``, ``what``,
        ``start_us``, ``end_us``, ``duration_us``. ``kind`` is that of a span (``what`` is its unit), a collective (its
        tag; from when the last rank had come), ``queued`` (a collective issued and not started), ``wake-up`` (it has
        ended, and its rank is not on again yet), ``host`` (outside of all spans) or ``late`` (the chain's first rank
        had not begun the step yet, which the first of all ranks had). They add up to the step.

    Raises:
        ValueError: columns or times are missing or cannot be true, no such run or step, ranks that disagree, or a
            stream that waited in the host's place.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    moved, worked, both = one_step_of_run(collectives, spans, run, step)
    nodes = causal_graph(moved, worked, axes)
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
    """What one step would gain if the transfer of some collectives took no time. Ranks still wait for each other.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``.
        tag: of the collectives that are free; None tries every tag in turn, and all together.
        run: which run; None where the tables hold one.
        step: which step; None for the last.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Returns:
        One row per tag, the largest gain first, none where nothing is communicated: ``run``, ``source``, ``step``,
        ``tag``, ``num_collectives`` (of all ranks), ``step_us``, ``gain_us``, ``gain`` (share of the step). The tag of
        all together is ``ALL``.

    Raises:
        ValueError: see ``critical_path``; or no collective of the step has that tag.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    moved, worked, both = one_step_of_run(collectives, spans, run, step)
    nodes = causal_graph(moved, worked, axes)
    tags = [node.tag for node in nodes if node.happening is Happening.END]
    if tag is not None and tag not in tags:
        raise ValueError(
            f"tag: {tag!r} is none of {', '.join(sorted(set(tags))) or 'the step, which has no collectives'}"
        )
    begin = min(node.time_us for node in nodes)
    end = max(node.time_us for node in nodes)
    trials = {name: {name} for name in (dict.fromkeys(tags) if tag is None else [tag])}
    if tag is None and tags:
        trials[ALL] = set(tags)
    rows = [
        (
            *both[[*RUN, "step"]].iloc[0],
            name,
            sum(one in freed for one in tags),
            end - begin,
            end - _end_without(nodes, freed),
        )
        for name, freed in trials.items()
    ]
    table = pd.DataFrame(rows, columns=[*RUN, "step", "tag", "num_collectives", "step_us", "gain_us"])
    table["gain"] = table["gain_us"] / table["step_us"]
    return table.sort_values("gain_us", ascending=False, kind="stable", ignore_index=True)


def _end_without(nodes: tuple[Node, ...], free: set[str]) -> float:
    """The end of the step had transfers with these tags taken no time."""
    times: dict[Node, float] = {}
    for node in nodes:
        ready = max((times[cause] for cause in node.causes), default=node.time_us)
        is_free = node.happening is Happening.END and node.tag in free
        times[node] = ready if is_free else ready + node.lasted_us
    return max(times.values())


def _walk(nodes: tuple[Node, ...], spans: pd.DataFrame) -> list[Piece]:
    """From the last node back to a begin, in order of time."""
    node = max(nodes, key=lambda node: node.time_us)
    begin_us = min(node.time_us for node in nodes)
    found: list[Piece] = []
    while node.causes:
        cause = max(node.causes, key=lambda cause: cause.time_us)
        found += reversed(list(_between(cause, node, spans)))
        node = cause
    return [(node.rank, LATE, "began later than another rank", begin_us, node.time_us), *found[::-1]]


def _between(cause: Node, node: Node, spans: pd.DataFrame) -> Iterator[Piece]:
    """What passed from the cause to its effect."""
    start, end = cause.time_us, node.time_us
    if node.happening is Happening.HOST:
        yield from _host_work(node.rank, start, end, spans)
        return
    kinds = {Happening.START: "queued", Happening.END: node.op, Happening.RESUMED: "wake-up"}
    yield node.rank, kinds[node.happening], node.tag, start, end


def _host_work(rank: int, start: float, end: float, spans: pd.DataFrame) -> Iterator[Piece]:
    """The innermost spans of a rank between two times, and ``host`` between them."""
    near = spans[(spans["rank"] == rank) & (spans["end_us"] > start) & (spans["start_us"] < end)]
    pieces, owners = innermost(bounds(near, "start_us", "end_us", "spans"))
    for (first, last), owner in zip(np.clip(pieces, start, end).tolist(), owners, strict=True):
        yield rank, "host", "", start, first
        row = near.iloc[owner]
        yield rank, str(row["kind"]), str(row["unit"]), first, last
        start = last
    yield rank, "host", "", start, end
