"""The compute of a profiled rank: kernels if there is a GPU, else the outermost operators of its threads.

The kind of work follows from what is open on the thread that issues it: optimizer inside ``Optimizer.step``, backward
inside a node of autograd, data inside a data loader, and otherwise forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardlab.analysis.intervals import Intervals, merge
from shardlab.export.kineto import RankTrace, Slice, collective_of, communicates
from shardlab.vocabulary import Phase, SpanKind

KERNEL = "kernel"
LAUNCHES = ("cuda_runtime", "cuda_driver")
# Operators that only contain others: the work is inside.
WRAPPERS = ("autograd::engine::", "torch::autograd::")
COMMUNICATION = ("c10d::", "c10d_functional::", "_c10d_functional::", "record_param_comms")
PHASES = {
    SpanKind.OPTIMIZER: Phase.STEP,
    SpanKind.BACKWARD: Phase.BACKWARD,
    SpanKind.DATA: Phase.DATA,
    SpanKind.FORWARD: Phase.FORWARD,
}


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of compute, which the host issued at ``issued_us``."""

    unit: str
    kind: SpanKind
    start_us: float
    end_us: float
    issued_us: float


class Kinds:
    """The kind of work that a thread does at a time."""

    def __init__(self, trace: RankTrace) -> None:
        marks = {
            SpanKind.OPTIMIZER: [one for one in trace.slices if one.name.startswith("Optimizer.step")],
            SpanKind.BACKWARD: [one for one in trace.slices if one.name.startswith("autograd::engine::evaluate")],
            SpanKind.DATA: [one for one in trace.slices if one.name.startswith("enumerate(DataLoader)")],
        }
        self._marks = {kind: _by_thread(slices) for kind, slices in marks.items()}

    def at(self, thread: tuple[str, str], time_us: float) -> SpanKind:
        """The kind of work that ``thread`` does at ``time_us``."""
        for kind, threads in self._marks.items():
            times = threads.get(thread)
            if times is not None:
                place = int(np.searchsorted(times[:, 0], time_us, side="right")) - 1
                if place >= 0 and time_us <= times[place, 1]:
                    return kind
        return SpanKind.FORWARD


class Launches:
    """The calls of the host that launched kernels."""

    def __init__(self, trace: RankTrace) -> None:
        self._calls = {one.args["correlation"]: one for one in trace.of(*LAUNCHES) if "correlation" in one.args}

    def of(self, kernel: Slice) -> Slice:
        """The launch of a kernel, or the kernel itself if the launch is not in the trace."""
        return self._calls.get(kernel.args.get("correlation"), kernel)


def compute(trace: RankTrace) -> Iterator[Work]:
    """All work of a rank except communication."""
    kinds, kernels = Kinds(trace), trace.of(KERNEL)
    if kernels:
        launches = Launches(trace)
        pairs = [(one, launches.of(one)) for one in kernels if not communicates(one)]
    else:
        pairs = [(one, one) for one in _operators(trace)]
    for one, asked in pairs:
        yield Work(one.name, kinds.at(asked.thread, asked.start_us), one.start_us, one.end_us, asked.start_us)


def _operators(trace: RankTrace) -> Iterator[Slice]:
    """The outermost operators of each thread, without wrappers and communication."""
    covered: dict[tuple[str, str], float] = {}
    for one in trace.of("cpu_op"):
        if one.thread in trace.communication_threads or one.start_us < covered.get(one.thread, -np.inf):
            continue
        communicates = one.name.startswith(COMMUNICATION)
        if not communicates and (one.name.startswith(WRAPPERS) or "::" not in one.name):
            continue
        covered[one.thread] = one.end_us
        if not communicates:
            yield one


def issues(trace: RankTrace) -> list[Slice]:
    """The calls with which the host issued collectives."""
    return [one for one in trace.of("cpu_op") if one.name.startswith("c10d::") and collective_of(one.name)]


def _by_thread(slices: Iterable[Slice]) -> dict[tuple[str, str], Intervals]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in slices:
        found.setdefault(one.thread, []).append((one.start_us, one.end_us))
    return {thread: merge(times) for thread, times in found.items()}
