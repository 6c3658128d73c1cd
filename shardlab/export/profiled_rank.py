"""What a profiled rank did: its compute, and its communication with the call that issued it.

Compute is kernels if there is a GPU, else the outermost operators of its threads; communication is kernels and gloo's
tasks. The kind of work follows from what is open on the thread that issues it: optimizer inside ``Optimizer.step``,
backward inside a node of autograd, data inside a data loader, and otherwise forward. A kernel whose launch is not in
the trace was launched before it began: nobody knows by which step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan, prod
from typing import Any

import numpy as np

from shardlab.analysis.intervals import Intervals, merge

from shardlab.export.kineto import (  # isort: skip
    RankTrace, Slice, collective_of, communicates, dtype_of, function_of, is_known_to_compute, looks_like,
)  # fmt: skip
from shardlab.partition.ring_cost import moved_bytes, ring_wire_bytes
from shardlab.vocabulary import Collective, MeshAxis, Phase, SpanKind

Row = dict[str, Any]
KERNEL, COPY = "kernel", "gpu_memcpy"
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver")
# Operators that only contain others: the work is inside.
WRAPPERS = ("autograd::engine::", "torch::autograd::")
COMMUNICATION = ("c10d::", "c10d_functional::", "_c10d_functional::", "record_param_comms")
# Operators whose shapes are those of one rank's chunk, not of the whole buffer.
REDUCE_SCATTER_OF_LIST = "c10d::reduce_scatter_"
OF_LISTS = ("c10d::allgather_", REDUCE_SCATTER_OF_LIST, "c10d::gather_", "c10d::scatter_")
MARKS = {  # what names of slices begin with, inside of which a thread does a kind of work
    SpanKind.OPTIMIZER: "Optimizer.step", SpanKind.BACKWARD: "autograd::engine::evaluate",
    SpanKind.DATA: "enumerate(DataLoader)",
}  # fmt: skip
PHASES = {
    SpanKind.OPTIMIZER: Phase.STEP, SpanKind.BACKWARD: Phase.BACKWARD, SpanKind.DATA: Phase.DATA,
    SpanKind.FORWARD: Phase.FORWARD,
}  # fmt: skip


class Kinds:
    """The kind of work that a thread does at a time."""

    def __init__(self, trace: RankTrace) -> None:
        self._marks = {
            kind: _by_thread(one for one in trace.slices if one.name.startswith(name)) for kind, name in MARKS.items()
        }

    def at(self, thread: tuple[str, str], time_us: float) -> SpanKind:
        """The kind of work that ``thread`` does at ``time_us``."""
        for kind, threads in self._marks.items():
            times = threads.get(thread)
            if times is not None:
                place = int(np.searchsorted(times[:, 0], time_us, side="right")) - 1
                if place >= 0 and time_us <= times[place, 1]:
                    return kind
        return SpanKind.FORWARD


def launched(trace: RankTrace, kernels: Iterable[Slice]) -> list[tuple[Slice, Slice | None]]:
    """Each kernel and the call of the host that launched it; None if that is not in the trace."""
    calls = {one.args["correlation"]: one for one in trace.of(*LAUNCHES) if "correlation" in one.args}
    return [(kernel, calls.get(kernel.args.get("correlation"))) for kernel in kernels]


def compute(trace: RankTrace) -> Iterator[tuple[float, Row]]:
    """All work of a rank except communication: when the host issued it, NaN if unknown, and a row of table ``spans``.

    There is none where a device computed and its kernels are not in the trace: what the host did meanwhile says little.
    """
    kinds, kernels = Kinds(trace), trace.of(KERNEL)
    works = launched(trace, (one for one in kernels if not communicates(one)))
    for one, asked in works if kernels or has_device(trace) else ((one, one) for one in _operators(trace)):
        kind = SpanKind.FORWARD if asked is None else kinds.at(asked.thread, asked.start_us)
        issued_us = nan if asked is None else asked.start_us
        yield issued_us, {"unit": one.name, "kind": kind, "start_us": one.start_us, "end_us": one.end_us}


def has_device(trace: RankTrace) -> bool:
    """Whether anything in the trace is of a device, or of a host that had one."""
    seen = any(one.category in (KERNEL, COPY, "gpu_memset", *LAUNCHES) for one in trace.slices)
    return seen or trace.names_device or any(one.name.startswith("nccl:") for one in trace.slices)


def uncertain(trace: RankTrace) -> Counter[str]:
    """Kernels that count as compute and may communicate: by the words in their names, or on a stream of their own."""
    streams: dict[tuple[str, str], list[Slice]] = {}
    for one in trace.of(KERNEL):
        if not communicates(one):
            streams.setdefault(one.thread, []).append(one)
    # The stream that is busiest with them is the one that computes, whoever wrote its kernels.
    main = max(streams, key=lambda stream: sum(one.end_us - one.start_us for one in streams[stream]), default=None)
    found: Counter[str] = Counter()
    for stream, kernels in streams.items():
        names = [function_of(one.name) for one in kernels]
        apart = stream != main and not any(map(is_known_to_compute, names))
        found.update(name for name in names if apart or looks_like(name))
    return found


def _operators(trace: RankTrace) -> Iterator[Slice]:
    """The outermost operators of each thread, without wrappers and communication."""
    covered: dict[tuple[str, str], float] = {}
    for one in trace.of("cpu_op"):
        if one.thread in trace.communication_threads or one.start_us < covered.get(one.thread, -np.inf):
            continue
        is_communication = one.name.startswith(COMMUNICATION)
        if is_communication or not (one.name.startswith(WRAPPERS) or "::" not in one.name):
            covered[one.thread] = one.end_us
            if not is_communication:
                yield one


def issues(trace: RankTrace) -> list[Slice]:
    """The calls with which the host issued collectives."""
    return [one for one in trace.of("cpu_op") if one.name.startswith("c10d::") and collective_of(one.name)]


def _by_thread(slices: Iterable[Slice]) -> dict[tuple[str, str], Intervals]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in slices:
        found.setdefault(one.thread, []).append((one.start_us, one.end_us))
    return {thread: merge(times) for thread, times in found.items()}


def communication(trace: RankTrace) -> list[tuple[float, Row]]:
    """That of a rank in order of issue: when the host issued it, NaN if unknown, and a row of table ``collectives``.

    What the trace does not say is missing.
    """
    found = [*_of_device(trace), *_of_gloo(trace)]
    return sorted(found, key=lambda pair: (pair[1]["issue_us"], pair[1]["start_us"]))


def _of_device(trace: RankTrace) -> Iterator[tuple[float, Row]]:
    kinds = Kinds(trace)
    for kernel, asked in launched(trace, [one for one in trace.of(KERNEL, COPY) if communicates(one)]):
        called, name = str(kernel.args.get("Collective name", "")), function_of(kernel.name)
        op = collective_of(called) or collective_of(name) or Collective.UNKNOWN
        tag = str(kernel.args.get("Tag") or (called if op is not Collective.UNKNOWN else "") or name)
        sizes = [int(kernel.args[key]) for key in ("In msg nelems", "Out msg nelems") if key in kernel.args]
        group = kernel.args.get("Group size")
        yield nan if asked is None else asked.start_us, _moved(
            op, tag, kernel, asked or kernel, "nccl" if name.startswith("nccl") else "device", kinds,
            dtype=str(kernel.args.get("dtype", "")), numel=max(sizes, default=None),
            group_size=None if group is None else int(group), axis=_axis(kernel.args),
        )  # fmt: skip


def _of_gloo(trace: RankTrace) -> Iterator[tuple[float, Row]]:
    kinds = Kinds(trace)
    # gloo does not say which group a task belongs to, so the size is known only if all groups have the same.
    group_size = trace.num_ranks if trace.group_sizes <= {trace.num_ranks} else None
    for call, tasks in _calls_and_tasks(trace):
        ran = replace(tasks[0], end_us=max(task.end_us for task in tasks))
        asked = call or ran
        op = collective_of(asked.name) or Collective.UNKNOWN
        types = ran.args.get("Input type") or [""]
        yield min(asked.start_us, ran.start_us), _moved(
            op, asked.name, ran, asked, "gloo", kinds, dtype=str(types[0]), group_size=group_size, axis=MeshAxis.DATA,
            numel=None if call is None else _numel(call, group_size),
        )  # fmt: skip


def _calls_and_tasks(trace: RankTrace) -> list[tuple[Slice | None, list[Slice]]]:
    """Each call with its gloo tasks. Tasks run in order of issue, so a task belongs to the first call that it fits.

    A task whose call is not in the trace stands alone.
    """
    found: list[tuple[Slice | None, list[Slice]]] = []
    # gloo runs one all-reduce for each chunk of a reduce-scatter of a list.
    numbers = {REDUCE_SCATTER_OF_LIST: trace.num_ranks}
    left: list[tuple[Slice, list[Slice], int]] = [(call, [], numbers.get(call.name, 1)) for call in issues(trace)]
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


def _moved(
    op: Collective, tag: str, ran: Slice, asked: Slice, transport: str, kinds: Kinds, *,
    dtype: str, numel: int | None, group_size: int | None, axis: str,
) -> Row:  # fmt: skip
    name, itemsize = dtype_of(dtype)
    # Without the collective nobody knows what part of the whole buffer the trace's numbers are.
    numel = 0 if op is Collective.BARRIER else None if op is Collective.UNKNOWN else numel
    num_bytes = 0 if numel == 0 else None if numel is None or itemsize is None else numel * itemsize
    wire = moved = nan
    if num_bytes is not None and group_size is not None:
        wire = ring_wire_bytes(op, num_bytes, group_size)
        moved = moved_bytes(transport, op, num_bytes, group_size)  # on average over the ranks: a trace names no root
    return {
        "axis": axis, "op": op, "tag": tag, "phase": PHASES[kinds.at(asked.thread, asked.start_us)], "dtype": name,
        "numel": numel, "bytes": num_bytes, "wire_bytes": wire, "moved_bytes": moved, "group_size": group_size,
        "transport": transport,
        # The clocks of host and device differ a little, but nothing can start before it is issued.
        "issue_us": min(asked.start_us, ran.start_us), "start_us": ran.start_us, "end_us": ran.end_us,
        "wait_start_us": nan, "wait_end_us": nan,
    }  # fmt: skip


def _fits(call: Slice, does: Collective | None) -> bool:
    """Whether a task fits a call; gloo runs a reduce-scatter as an all-reduce."""
    op = collective_of(call.name)
    return op == does or (op is Collective.REDUCE_SCATTER and does is Collective.ALL_REDUCE)


def _numel(call: Slice, group_size: int | None) -> int | None:
    """Elements of the whole buffer: the larger of input and output."""
    dims = call.args.get("Input Dims")
    if not dims:
        return None  # shapes were not recorded
    largest = max(_size(entry) for entry in dims[:2])
    if call.name in OF_LISTS:
        return None if group_size is None else largest * group_size
    return largest


def _size(dims: Sequence[Any]) -> int:
    """Elements of a tensor's shape, or of all shapes in a list; an empty entry is no tensor."""
    if not isinstance(dims, list) or not dims:
        return 0
    shapes = dims if isinstance(dims[0], list) else [dims]
    return sum(prod(shape) for shape in shapes if shape)


def _axis(args: Mapping[str, Any]) -> str:
    """The axis of a process group: its description, or the data axis for the default group."""
    name = str(args.get("Process Group Description") or "").removeprefix("mesh_")
    return MeshAxis.DATA if name in ("", "default_pg", "undefined") else name
