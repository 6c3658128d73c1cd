"""The messages of a step on all ranks, from the step of one rank that runs without ranks and values.

    DryRun(step, {"data": 8}).messages()        # table ``collectives``, source="predicted"; ``step(mesh, log)`` trains

What one rank sends says what all send: the same messages in the same order, over groups that follow from the mesh. They
differ where chunks are uneven. Then what a rank sends of them follows from their bounds; and if such a group is not all
ranks, what it holds may travel on over another axis, so each kind of rank runs once. Where ranks send to single others,
each place in their group is a kind of its own.
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from shardlab.comm import BaseMesh, CollectiveEvent, Observer
from shardlab.comm.foretold import ForetoldMesh
from shardlab.comm.rank_life import observing_new
from shardlab.dry.without_values import WithoutValues
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.records.tables import COLLECTIVES
from shardlab.tensor_parallel.rng import generators_seeded
from shardlab.vocabulary import Collective, Phase, SpanKind

T = TypeVar("T")
Places = dict[str, dict[int, int]]


class Sent(NamedTuple):
    """A message, and the phase in which it was sent."""

    event: CollectiveEvent
    phase: Phase

    def wire_bytes(self, member: int) -> float:
        """Bytes that this member of the group sends, by the ring formula."""
        event, own = self.event, None
        if event.bounds is not None:
            own = (event.bounds[member + 1] - event.bounds[member]) * event.num_bytes // max(1, event.numel)
        return ring_wire_bytes(event.op, event.num_bytes, event.group_size, own)

    @property
    def is_uneven(self) -> bool:
        """Whether its chunks have different sizes."""
        return self.event.bounds is not None and len(set(np.diff(self.event.bounds).tolist())) > 1


class Log(Observer):
    """The messages of the step that was begun last; those that only measure are left out."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._phase, self._is_open = Phase.SETUP, False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, which takes the place of the one before."""
        self.sent, self._is_open = [], True
        try:
            yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def phase(self, phase: Phase, kind: SpanKind | None = None, unit: str = "") -> Iterator[None]:
        """Inside, messages are of this phase."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        if self._is_open and self._phase != Phase.METRICS:
            self.sent.append(Sent(event, self._phase))


class _OnRanks(Observer):
    """Refuses what is sent over a mesh that a step makes itself: there are no ranks, or they run no step."""

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        raise RuntimeError(f"{event.tag!r} is sent over axis {event.axis!r} of another mesh, which needs ranks")


Step = Callable[[BaseMesh, Log], T]
"""Trains at least one step inside ``log.step()``, on one rank of a mesh; what it returns is kept."""


class DryRun(Generic[T]):
    """A step on as many ranks as are unlike.

    Args:
        step: what is run.
        axes: of the mesh; its ranks need not be there.
        kinds: of a rank, of what ``step`` has returned on the first one, and of the ranks' places: what makes ranks
            unlike beside their chunks.
        shapes: see ``WithoutValues``.
        alike: whether no rank uses parameters that another does not.

    Raises:
        Exception: what ``step`` raises, for example because it depends on values.
    """

    def __init__(
        self, step: Step[T], axes: Mapping[str, int], kinds: Callable[[int, T, Places], Hashable] = lambda *_: None,
        shapes: dict[Hashable, Any] | None = None, *, alike: bool = True,
    ) -> None:  # fmt: skip
        self._step, self._axes, self._kinds = step, axes, kinds
        self._shapes: dict[Hashable, Any] = {} if shapes is None else shapes
        self._alike, self.num_ranks = alike, prod(axes.values())
        self._places, first = self._run(0)  # by axis, part or product, of each rank its place in its group
        self._first = first[1]
        apart = [one.event for one in first[0] if one.is_uneven and one.event.group_size < self.num_ranks]
        self._chunks = list(dict.fromkeys((str(event.axis), event.bounds or ()) for event in apart))
        between_two = [one.event for one in first[0] if one.event.op in (Collective.SEND, Collective.RECV)]
        self._apart = sorted({str(event.axis) for event in between_two})
        self._known = {self._kind(0): first}

    def of_rank(self, rank: int) -> tuple[list[Sent], T]:
        """The messages of a rank, and what ``step`` has returned on it or on one that is alike."""
        kind = self._kind(rank)
        if kind not in self._known:
            self._known[kind] = self._run(rank)[1]
        return self._known[kind]

    def messages(self, ranks: Sequence[int] | None = None, run: str = "") -> pd.DataFrame:
        """Table ``collectives``, rank by rank in the order of issue, times NaN.

        Args:
            ranks: those wanted; None for all.
            run: its name.
        """
        wanted: dict[Hashable, list[int]] = {}
        for rank in range(self.num_ranks) if ranks is None else ranks:
            wanted.setdefault(self._kind(rank), []).append(rank)
        tables = [self._table(self.of_rank(some[0])[0], some, run) for some in wanted.values()]
        if not tables:
            return COLLECTIVES.frame([])
        return COLLECTIVES.frame(pd.concat(tables).sort_values(["rank", "seq"], ignore_index=True))

    def _run(self, rank: int) -> tuple[Places, tuple[list[Sent], T]]:
        log = Log()
        with contextlib.ExitStack() as stack:
            stack.enter_context(generators_seeded(0))
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # they come where it trains
            mesh = stack.enter_context(ForetoldMesh(self._axes, rank, are_alike=self._alike))
            stack.enter_context(mesh.observed_by(log))
            stack.enter_context(observing_new(_OnRanks()))
            stack.enter_context(WithoutValues(lambda *_: None, self._shapes))
            found = self._step(mesh, log)
        return mesh.places, (log.sent, found)

    def _kind(self, rank: int) -> Hashable:
        members = ((self._places[axis][rank], bounds) for axis, bounds in self._chunks)
        of_chunks = (bounds[member + 1] - bounds[member] for member, bounds in members)
        return (
            self._kinds(rank, self._first, self._places),
            *of_chunks,
            *(self._places[axis][rank] for axis in self._apart),
        )

    def _table(self, sent: Sequence[Sent], ranks: Sequence[int], run: str) -> pd.DataFrame:
        """The messages of ranks that are alike but for their place in each group."""
        table = pd.DataFrame([_row(one, seq, run) for seq, one in enumerate(sent)], columns=COLLECTIVES.column_names)
        of_ranks = [self._wire_bytes(one, ranks) for one in sent]
        return table.iloc[np.tile(np.arange(len(sent)), len(ranks))].assign(
            rank=np.repeat(ranks, len(sent)), wire_bytes=np.stack(of_ranks, 1).ravel() if sent else []
        )

    def _wire_bytes(self, one: Sent, ranks: Sequence[int]) -> Any:
        if not one.is_uneven:
            return np.full(len(ranks), one.wire_bytes(0))
        return np.array([one.wire_bytes(self._places[str(one.event.axis)][rank]) for rank in ranks])


def _row(one: Sent, seq: int, run: str) -> dict[str, object]:
    """Without times."""
    event = one.event
    return {
        "run": run, "source": "predicted", "step": 0, "seq": seq, "axis": event.axis, "op": event.op, "tag": event.tag,
        "phase": one.phase, "dtype": event.dtype, "numel": event.numel, "bytes": event.num_bytes,
        "group_size": event.group_size, "transport": "",
    }  # fmt: skip
