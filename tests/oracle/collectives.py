"""The list of collectives of one step on every rank, counted by hand: what the dry run of the engine is held against.

In elements per rank and step on a ring, with M = 1; (N - 1)/N of a buffer is what a rank sends of it:

================  ==========================================================  ===================
strategy          collectives                                                 elements sent
================  ==========================================================  ===================
ddp               an all-reduce per parameter                                 2P (N-1)/N
bucketed          an all-reduce per bucket                                    2P (N-1)/N
zero1, zero2      a reduce-scatter, after the step an all-gather per bucket   2P (N-1)/N
zero3             an all-gather per bucket before forward and again before    3P (N-1)/N
                  backward, a reduce-scatter
fsdp full_shard   the same per unit, in the order of execution                3P (N-1)/N
shard_grad_op     an all-gather in forward, a reduce-scatter                  2P (N-1)/N
no_shard          an all-reduce per unit                                      2P (N-1)/N
hybrid_shard      as full_shard over S ranks, then an all-reduce of the       3P (S-1)/S +
                  shard across R replicas                                     2 P/S (R-1)/R
================  ==========================================================  ===================

Of M micro-batches only the last sends gradients; each gathers its parameters. After the last gradients, and once more
before the optimizer steps, one number over each data axis says whether a rank refuses to go on; the first time one more
for each parameter says whether a rank has used it. Behind the step come
buffers, with ``broadcast_buffers``. A group of one rank sends nothing and has no rows. For a tensor-parallel model this
file covers the data axes, and norms over the tensor axis; ``oracle.tensor`` covers the rest. Not listed: what is sent
before the first step, and the mean of the loss, which the training step sends. Units inside others are not counted.
Source: Rajbhandari et al., arXiv 1910.02054, section 7; Zhao et al., arXiv 2304.11277, section 3.2.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import pandas as pd

from shardlab.comm.coalesced import packed
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.planner.groups import ROOT, Group, groups_of
from shardlab.planner.setup import ITEMSIZES, PlannedModel, PlannedParam, Setup
from shardlab.records.tables import COLLECTIVES
from shardlab.vocabulary import FLAG, Collective, MeshAxis, Phase, Sharding


@dataclass(frozen=True)
class Call:
    """One collective of a step. ``chunk_numels``: elements of each member's chunk, if the verb has chunks."""

    op: Collective
    axis: MeshAxis
    tag: str
    phase: Phase
    dtype: str
    itemsize: int
    numel: int
    group_size: int
    chunk_numels: tuple[int, ...] | None = None

    def wire_bytes(self, member: int) -> float:
        """Bytes that this member of the group sends, by the ring formula."""
        own = None if self.chunk_numels is None else self.chunk_numels[member] * self.itemsize
        return ring_wire_bytes(self.op, self.numel * self.itemsize, self.group_size, own)

    def row(self, run: str, rank: int, seq: int, member: int) -> dict[str, object]:
        """The row of table ``collectives`` for a rank that is ``member`` of the group."""
        return {
            "run": run, "source": "predicted", "rank": rank, "step": 0, "seq": seq, "axis": self.axis, "op": self.op,
            "tag": self.tag, "phase": self.phase, "dtype": self.dtype, "numel": self.numel,
            "bytes": self.numel * self.itemsize, "wire_bytes": self.wire_bytes(member), "group_size": self.group_size,
            "transport": "", "issue_us": nan, "start_us": nan, "end_us": nan, "wait_start_us": nan, "wait_end_us": nan,
        }  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """What a forward does with FSDP's units.

    ``called``: their names in the order of their calls, each once; None for all, in the module's order. Units that no
    forward calls are not gathered, but reduced. ``unreached``: those that backward does not reach.
    """

    called: tuple[str, ...] | None = None
    unreached: tuple[str, ...] = ()


def counted_collectives(
    model: PlannedModel, setup: Setup, forward: Forward | None = None, *, ranks: Sequence[int] | None = None
) -> pd.DataFrame:
    """Table ``collectives``: rank by rank in the order of issue, times NaN."""
    wanted = setup.ranks_among(ranks)
    # The sizes of what replicas exchange depend on the chunk that they hold.
    chunk_of = {rank: setup.shard_of(rank) if setup.hybrid else 0 for rank in wanted}
    calls = {chunk: calls_of_step(model, setup, chunk, forward) for chunk in set(chunk_of.values())}
    rows = []
    for rank in wanted:
        rows += [
            call.row(setup.strategy, rank, seq, _member(rank, call, setup))
            for seq, call in enumerate(calls[chunk_of[rank]])
        ]
    return COLLECTIVES.frame(rows)


def calls_of_step(model: PlannedModel, setup: Setup, chunk: int = 0, forward: Forward | None = None) -> list[Call]:
    """The collectives of one step in the order of issue, the same on every rank that holds this chunk."""
    planner = _Step(groups_of(model, setup), setup, model, chunk, forward or Forward())
    calls = {
        "single": planner.nothing, "ddp": planner.reduced, "bucketed": planner.reduced, "zero1": planner.zero1,
        "zero2": planner.zero1, "zero3": planner.zero3, "fsdp": planner.fsdp,
    }[setup.strategy]()  # fmt: skip
    buffers = planner.buffers(model.buffers) if setup.broadcast_buffers else ()
    return [call for call in (*calls, *buffers) if call.group_size > 1]


class _Step:
    """The step of each strategy as a list of calls."""

    def __init__(
        self, groups: Sequence[Group], setup: Setup, model: PlannedModel, chunk: int, forward: Forward
    ) -> None:  # fmt: skip
        self.setup, self.tensor_ranks, self.chunk, self.unreached = setup, model.tensor_ranks, chunk, forward.unreached
        self.num_params = len(model.params)
        self.groups, self.uncalled = list(groups), frozenset[str]()
        if forward.called is not None:
            places = {unit: place for place, unit in enumerate((ROOT, *forward.called))}
            self.groups.sort(key=lambda group: places.get(group.unit, len(places)))  # stable: the others as they were
            self.uncalled = frozenset(setup.units) - frozenset(forward.called)
        self.gathers_again = setup.sharding in (Sharding.FULL_SHARD, Sharding.HYBRID_SHARD)
        self.trainable = [group for group in groups if group.trainable]
        self.axis = MeshAxis.SHARD if setup.hybrid else MeshAxis.DATA

    def nothing(self) -> Iterator[Call]:
        yield from ()

    def reduced(self) -> Iterator[Call]:
        """All gradients, once a backward is over."""
        for group in self.trainable:
            yield from self.start_reduce(group)
        yield from self.until_step()

    def zero1(self) -> Iterator[Call]:
        yield from self.reduced()
        for group in self.trainable:
            yield self.gather(group, Phase.STEP)

    def zero3(self) -> Iterator[Call]:
        for _ in range(self.setup.micro_batches):
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                for group in self.groups:
                    yield self.gather(group, phase)
        yield from self.reduced()

    def fsdp(self) -> Iterator[Call]:
        for micro_batch in range(self.setup.micro_batches):
            for group in self.groups:
                if group.unit not in self.uncalled:
                    yield self.gather(group, Phase.FORWARD)
            yield from self.backward(last=micro_batch == self.setup.micro_batches - 1)
        yield from self.until_step()

    def backward(self, *, last: bool) -> Iterator[Call]:
        """A backward of FSDP: gathers where parameters were resharded, reductions where the step ends."""
        units = {group.unit: [other for other in self.groups if other.unit == group.unit] for group in self.groups}
        called = [name for name in units if name != ROOT and name not in self.uncalled]
        frozen = {name for name, groups in units.items() if not any(group.trainable for group in groups)}
        to_reduce, complete = self.reduction_order(units), frozen | self.uncalled
        begun: list[Group] = []  # reduced over their first axis, not yet over the others
        root, passed = ROOT if ROOT in units else None, self.unreached
        for verb, name in backward_order(called, root, self.setup.prefetch, passed):
            if verb == "gather":
                yield from (self.gather(group, Phase.BACKWARD) for group in units[name] if self.gathers_again)
                continue
            complete.add(name)
            # A unit waits for those before it in the order: on another rank they may be complete the other way round.
            while last and to_reduce and to_reduce[0] in complete:
                unit = to_reduce.pop(0)
                if trainable := [group for group in units[unit] if group.trainable]:
                    yield from self.reduce_behind(begun, trainable)
                    begun = trainable
        yield from self.reduce_behind(begun, [])

    def reduction_order(self, units: Mapping[str, Sequence[Group]]) -> list[str]:
        """The order of FSDP's reductions: that of the gathers backwards; then units that nobody gathers, and the root.

        Those are the units that every rank holds whole or that forward does not call, in the module's order backwards.
        """
        gathered = [
            name for name, groups in units.items()
            if name not in (ROOT, *self.uncalled) and not all(group.is_whole for group in groups)
        ]  # fmt: skip
        others = [name for name in self.setup.units if name in units and name not in gathered]
        return [*reversed(gathered), *reversed(others), *([ROOT] if ROOT in units else [])]

    def reduce_behind(self, begun: Sequence[Group], groups: Sequence[Group]) -> Iterator[Call]:
        """Begin to reduce ``groups``; one reduction at a time: that of ``begun`` is finished first."""
        for group in begun:
            yield from self.finish_reduce(group)
        for group in groups:
            yield from self.start_reduce(group)

    def until_step(self) -> Iterator[Call]:
        """What is sent between the last gradients and the optimizer's step."""
        yield from self.flag(Phase.BACKWARD, 1 + self.num_params)
        yield from self.clip()
        yield from self.flag(Phase.STEP, 1)

    def buffers(self, buffers: Sequence[PlannedParam]) -> Iterator[Call]:
        """Those of the first data rank, after the step."""
        for axis, size in self.data_axes:
            for sent in packed(buffers, lambda buffer: buffer.dtype, lambda buffer: buffer.spec.num_bytes):
                yield Call(
                    Collective.BROADCAST, axis, "buffers from rank 0", Phase.STEP, sent[0].dtype,
                    sent[0].spec.itemsize, sum(buffer.spec.numel for buffer in sent), size,
                )  # fmt: skip

    def flag(self, phase: Phase, numel: int) -> Iterator[Call]:
        """Whether a rank refuses, and which parameters one has used, over each data axis, outer first.

        (``data_axes`` has them inner first, as reductions need them.)
        """
        for axis, size in self.data_axes[::-1]:
            yield Call(Collective.ALL_REDUCE, axis, FLAG, phase, "int32", 4, numel, size)

    def clip(self) -> Iterator[Call]:
        """The norm of sharded gradients; before it, for a gradient scaler, one scalar per axis for the inf check."""
        if self.setup.scales_loss:
            for axis, size in (*self.data_axes[::-1], (MeshAxis.TENSOR, self.tensor_ranks)):
                yield Call(Collective.ALL_REDUCE, axis, "overflow", Phase.CLIP, "float32", 4, 1, size)
        if self.setup.clip:
            # The sums of tensor-parallel slices stay separate, because they are added over the tensor axis too.
            kinds = {(not group.is_whole, param.sliced) for group in self.groups for param in group.params.values()}
            yield self.norm(self.axis, len({sliced for sharded, sliced in kinds if sharded}), self.setup.num_shards)
            yield self.norm(MeshAxis.TENSOR, len({sharded for sharded, sliced in kinds if sliced}), self.tensor_ranks)

    def norm(self, axis: MeshAxis, num_kinds: int, num_ranks: int) -> Call:
        """The all-reduce of norms over an axis; over one rank, which sends nothing, if nothing is spread over it."""
        ranks = num_ranks if num_kinds else 1
        return Call(Collective.ALL_REDUCE, axis, "gradient norm", Phase.CLIP, "float64", 8, num_kinds, ranks)

    def gather(self, group: Group, phase: Phase) -> Call:
        layout = group.layout
        return Call(
            Collective.ALL_GATHER, self.axis, f"parameters of {group.name}", phase, *self.parameter_element(group),
            layout.padded_numel, layout.num_ranks, layout.chunk_sizes,
        )  # fmt: skip

    def reduce_scatter(self, group: Group) -> Call:
        layout = group.layout
        return Call(
            Collective.REDUCE_SCATTER, self.axis, f"gradients of {group.name}", Phase.BACKWARD,
            *self.gradient_element(group), layout.padded_numel, layout.num_ranks, layout.chunk_sizes,
        )  # fmt: skip

    def start_reduce(self, group: Group) -> Iterator[Call]:
        """The first reduction of a group: over its shards, or over ranks that hold all of it."""
        if not group.is_whole:
            yield self.reduce_scatter(group)
        elif self.data_axes:
            yield self.over_axis(group, self.data_axes[0])

    def finish_reduce(self, group: Group) -> Iterator[Call]:
        """Those over the other axes, whose ranks hold the same chunk."""
        return (self.over_axis(group, axis) for axis in self.data_axes[1:])

    def over_axis(self, group: Group, axis: tuple[MeshAxis, int]) -> Call:
        """The sum of a chunk over the ranks that hold the same one."""
        noun = "gradient" if self.setup.strategy == "ddp" else "gradients"
        name, size = axis
        return Call(
            Collective.ALL_REDUCE, name, f"{noun} of {group.name}", Phase.BACKWARD, *self.gradient_element(group),
            group.layout.chunk_sizes[0 if group.is_whole else self.chunk], size,
        )  # fmt: skip

    @property
    def data_axes(self) -> tuple[tuple[MeshAxis, int], ...]:
        """Names and sizes of the axes gradients are averaged over, inner first, without those of one rank."""
        axes: tuple[tuple[MeshAxis, int], ...] = ((MeshAxis.DATA, self.setup.num_ranks),)
        if self.setup.hybrid:
            shards = self.setup.num_shards
            axes = ((MeshAxis.SHARD, shards), (MeshAxis.REPLICA, self.setup.num_ranks // shards))
        return tuple((name, size) for name, size in axes if size > 1)

    def parameter_element(self, group: Group) -> tuple[str, int]:
        """Element type and bytes of a parameter on the wire."""
        dtype = self.setup.dtype_in_compute(group.dtype)
        return (group.dtype, group.itemsize) if dtype == group.dtype else (dtype, ITEMSIZES[dtype])

    def gradient_element(self, group: Group) -> tuple[str, int]:
        """Element type and bytes of a gradient on the wire."""
        dtype = self.setup.dtype_in_reduction(group.dtype)
        if dtype != group.dtype:
            return dtype, ITEMSIZES[dtype]
        if self.setup.precision is None or self.setup.precision.gradient == group.itemsize:
            return group.dtype, group.itemsize
        like = next(iter(group.params.values())).with_itemsize(self.setup.precision.gradient)
        return like.dtype, like.spec.itemsize


def _member(rank: int, call: Call, setup: Setup) -> int:
    return rank // setup.num_shards if call.axis == MeshAxis.REPLICA else rank % call.group_size


def backward_order(
    units: Sequence[str], root: str | None, prefetch: int, unreached: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """The order in which an FSDP backward gathers units and reduces their gradients.

    Backward reaches the root first, since the model's output is the root's, then the wrapped units in the reverse order
    of forward; when it reaches a unit, that unit and the next ``prefetch`` ones are gathered unless they are already. A
    unit's gradients are complete, and are reduced, before backward reaches the next unit; the root's own, the
    embedding's among them, come last of all. With units 1, 2, 3:

        prefetch 0    gather root, gather 3, reduce 3, gather 2, reduce 2, gather 1, reduce 1, reduce root
        prefetch 1    gather root, gather 3, gather 2, reduce 3, gather 1, reduce 2, reduce 1, reduce root

    Args:
        units: the wrapped units in the order of forward.
        root: name of the unit of all other parameters; None where there are none.
        prefetch: units gathered ahead, 0 or more.
        unreached: units whose outputs need no gradient: backward does not come to them.

    Returns:
        Pairs of 'gather' or 'reduce' and the unit's name.
    """
    reached = ([] if root is None else [root]) + [unit for unit in reversed(units) if unit not in unreached]
    num_gathered = 0
    for place, unit in enumerate(reached):
        ahead = min(place + 1 + prefetch, len(reached))
        for later in reached[max(num_gathered, place) : ahead]:
            yield "gather", later
        num_gathered = max(num_gathered, ahead)
        if unit != root:
            yield "reduce", unit
    if root is not None:
        yield "reduce", root
