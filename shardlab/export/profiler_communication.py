"""The communication of a profiled rank: kernels and gloo's tasks, each with the call that issued it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardlab.export.kineto import RankTrace, Slice, collective_of, communicates, count, dtype_of, function_of
from shardlab.export.profiler_compute import KERNEL, Kinds, Launches, issues
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.partition.torch_gloo import moved_bytes
from shardlab.vocabulary import Collective, MeshAxis, SpanKind

COPY = "gpu_memcpy"
# Operators whose shapes are those of one rank's chunk, not of the whole buffer.
REDUCE_SCATTER_OF_LIST = "c10d::reduce_scatter_"
OF_LISTS = ("c10d::allgather_", REDUCE_SCATTER_OF_LIST, "c10d::gather_", "c10d::scatter_")


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective; what the trace does not contain is None."""

    op: Collective
    tag: str
    axis: str
    transport: str
    kind: SpanKind
    dtype: str
    numel: int | None
    num_bytes: int | None
    group_size: int | None
    issue_us: float
    start_us: float
    end_us: float

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank had to send, by the ring formula; NaN if size or group are unknown."""
        if self.num_bytes is None or self.group_size is None:
            return float("nan")
        return ring_wire_bytes(self.op, self.num_bytes, self.group_size)

    @property
    def moved_bytes(self) -> float:
        """Bytes this rank sent, on average over the ranks, since a trace names no root; NaN if unknown."""
        if self.num_bytes is None or self.group_size is None:
            return float("nan")
        return moved_bytes(self.transport, self.op, self.num_bytes, self.group_size)


def communication(trace: RankTrace) -> list[Moved]:
    """All collectives of a rank in order of issue."""
    return sorted([*_of_device(trace), *_of_gloo(trace)], key=lambda moved: (moved.issue_us, moved.start_us))


def _of_device(trace: RankTrace) -> Iterator[Moved]:
    kinds, launches = Kinds(trace), Launches(trace)
    for kernel in (one for one in trace.of(KERNEL, COPY) if communicates(one)):
        called, name = str(kernel.args.get("Collective name", "")), function_of(kernel.name)
        op = collective_of(called) or collective_of(name) or Collective.UNKNOWN
        tag = str(kernel.args.get("Tag") or (called if op is not Collective.UNKNOWN else "") or name)
        asked = launches.of(kernel)
        sizes = [count(kernel.args[key], key) for key in ("In msg nelems", "Out msg nelems") if key in kernel.args]
        group = kernel.args.get("Group size")
        yield _moved(
            op, tag, kernel, asked, "nccl" if name.startswith("nccl") else "device", kinds,
            dtype=str(kernel.args.get("dtype", "")), numel=max(sizes, default=None),
            group_size=None if group is None else count(group, "Group size"), axis=_axis(kernel.args),
        )  # fmt: skip


def _of_gloo(trace: RankTrace) -> Iterator[Moved]:
    kinds = Kinds(trace)
    # gloo does not say which group a task belongs to, so the size is known only if all groups have the same.
    group_size = trace.num_ranks if trace.group_sizes <= {trace.num_ranks} else None
    for call, tasks in _calls_and_tasks(trace):
        ran = replace(tasks[0], end_us=max(task.end_us for task in tasks))
        asked = call or ran
        op = collective_of(asked.name) or Collective.UNKNOWN
        numel = None if call is None else _numel(call, group_size)
        yield _moved(
            op, asked.name, ran, asked, "gloo", kinds, dtype=_first_type(ran), numel=numel, group_size=group_size,
            axis=MeshAxis.DATA,
        )  # fmt: skip


def _calls_and_tasks(trace: RankTrace) -> list[tuple[Slice | None, list[Slice]]]:
    """Each call with its gloo tasks. Tasks run in order of issue, so a task belongs to the first call that it fits.

    A task whose call is not in the trace stands alone.
    """
    found: list[tuple[Slice | None, list[Slice]]] = []
    left: list[tuple[Slice, list[Slice], int]] = [(call, [], _num_tasks(call, trace)) for call in issues(trace)]
    for task in trace.slices:
        if not task.name.startswith("gloo:"):
            continue
        does = collective_of(task.name)
        mine = next((one for one in left if one[0].start_us <= task.start_us and _fits(one[0], does)), None)
        if mine is None:
            found.append((None, [task]))
            continue
        call, tasks, number = mine
        if not tasks:
            found.append((call, tasks))
        tasks.append(task)
        if len(tasks) == number:
            left.remove(mine)
    return found


def _num_tasks(call: Slice, trace: RankTrace) -> int:
    """gloo runs one all-reduce for each chunk of a reduce-scatter of a list."""
    return trace.num_ranks if call.name == REDUCE_SCATTER_OF_LIST else 1


def _moved(
    op: Collective, tag: str, ran: Slice, asked: Slice, transport: str, kinds: Kinds, *,
    dtype: str, numel: int | None, group_size: int | None, axis: str,
) -> Moved:  # fmt: skip
    name, itemsize = dtype_of(dtype)
    # Without the collective nobody knows what part of the whole buffer the trace's numbers are.
    numel = 0 if op is Collective.BARRIER else None if op is Collective.UNKNOWN else numel
    num_bytes = 0 if numel == 0 else None if numel is None or itemsize is None else numel * itemsize
    # The clocks of host and device differ a little, but nothing can start before it is issued.
    issue_us = min(asked.start_us, ran.start_us)
    kind = kinds.at(asked.thread, asked.start_us)
    return Moved(op, tag, axis, transport, kind, name, numel, num_bytes, group_size, issue_us, ran.start_us, ran.end_us)


def _fits(call: Slice, does: Collective | None) -> bool:
    """Whether a task fits a call; gloo runs a reduce-scatter as an all-reduce."""
    op = collective_of(call.name)
    return op == does or (op is Collective.REDUCE_SCATTER and does is Collective.ALL_REDUCE)


def _numel(call: Slice, group_size: int | None) -> int | None:
    """Elements of the whole buffer: the larger of input and output."""
    dims = call.args.get("Input Dims")
    if not dims:
        return None  # shapes were not recorded
    largest = count(max(_size(entry) for entry in dims[:2]), "Input Dims")
    if call.name in OF_LISTS:
        return None if group_size is None else largest * group_size
    return largest


def _size(dims: Sequence[Any]) -> int:
    """Elements of a tensor's shape, or of all shapes in a list; an empty entry is no tensor."""
    if not isinstance(dims, list) or not dims:
        return 0
    shapes = dims if isinstance(dims[0], list) else [dims]
    return sum(prod(count(dim, "Input Dims") for dim in shape) for shape in shapes if shape)


def _first_type(task: Slice) -> str:
    types = task.args.get("Input type") or [""]
    return str(types[0])


def _axis(args: Mapping[str, Any]) -> str:
    """The axis of a process group: its description, or the data axis for the default group."""
    name = str(args.get("Process Group Description") or "").removeprefix("mesh_")
    return MeshAxis.DATA if name in ("", "default_pg", "undefined") else name
