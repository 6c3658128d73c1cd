"""What torch's own engines send, told as the same events as what a communicator sends.

``DistributedDataParallel``, ``fully_shard`` and DTensor call torch's process groups themselves, partly from C++. So
they get a process group that passes every call on to the real one and tells the communicator's observers of it. Torch's
public way to have a group of one's own is a registered backend; ``Mesh.torch_group`` makes the group through it.

Issue and, where torch waits through Python, the waiting are seen as they happen. Where C++ waits (DDP, at the end of
backward) ``end_waits`` works it out. When a collective began is seen in two ways, ``HostTimes`` for gloo and
``StreamTimes`` for NCCL. Torch's gloo groups hold a copy of the whole buffer in a reduce-scatter and an all-gather, as
torch's own profiler shows (torch 2.11 and 2.13): that is their ``scratch_bytes``.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from math import isnan
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.vocabulary import Collective

BACKEND = "overheard"
GLOO_THREADS = 2  # torch gives a gloo group two threads: a third collective waits until one of them is free
TagOf = Callable[[Collective], str]


class _Verb(NamedTuple):
    op: Collective
    whole: Callable[..., Any]  # of the call's arguments the tensors that are whole, nested in lists as torch has them
    gloo_copies: bool = False  # whether torch's gloo group holds a copy of the whole meanwhile


# A verb has another name from Python, from C++ and before torch 2.13; each torch calls those that it knows.
_VERBS = {
    "allreduce": _Verb(Collective.ALL_REDUCE, lambda tensors, *_: tensors),
    "allreduce_coalesced": _Verb(Collective.ALL_REDUCE, lambda tensors, *_: tensors),
    "broadcast": _Verb(Collective.BROADCAST, lambda tensors, *_: tensors),
    "allgather": _Verb(Collective.ALL_GATHER, lambda outputs, *_: outputs),
    "_allgather_base": _Verb(Collective.ALL_GATHER, lambda output, *_: output, gloo_copies=True),
    "all_gather_single": _Verb(Collective.ALL_GATHER, lambda output, *_: output, gloo_copies=True),
    "allgather_into_tensor_coalesced": _Verb(Collective.ALL_GATHER, lambda outputs, *_: outputs),
    "all_gather_single_coalesced": _Verb(Collective.ALL_GATHER, lambda outputs, *_: outputs),
    "reduce_scatter": _Verb(Collective.REDUCE_SCATTER, lambda _, inputs, *__: inputs),
    "_reduce_scatter_base": _Verb(Collective.REDUCE_SCATTER, lambda _, whole, *__: whole, gloo_copies=True),
    "reduce_scatter_single": _Verb(Collective.REDUCE_SCATTER, lambda _, whole, *__: whole, gloo_copies=True),
    "reduce_scatter_tensor_coalesced": _Verb(Collective.REDUCE_SCATTER, lambda _, inputs, *__: inputs),
    "reduce_scatter_single_coalesced": _Verb(Collective.REDUCE_SCATTER, lambda _, inputs, *__: inputs),
    "alltoall_base": _Verb(Collective.ALL_TO_ALL, lambda _, whole, *__: whole),
    "all_to_all_single": _Verb(Collective.ALL_TO_ALL, lambda _, whole, *__: whole),
    "barrier": _Verb(Collective.BARRIER, lambda *_: ()),
}


def _with_verbs(kind: type["OverheardGroup"]) -> type["OverheardGroup"]:
    """Give the group a method for each verb this torch has."""
    for name, verb in _VERBS.items():
        if hasattr(dist.ProcessGroup, name):
            setattr(kind, name, _method(name, verb))
    return kind


def _method(name: str, verb: _Verb) -> Callable[..., dist.Work]:
    def call(self: "OverheardGroup", *args: Any, **kwargs: Any) -> dist.Work:
        return self._pass_on(name, verb, args, kwargs)

    return call


@_with_verbs
class OverheardGroup(dist.ProcessGroup):
    """A process group for torch's own engines that tells what passes through it.

    Verbs that are not in the table above (scatter, gather, reduce) are refused by torch: no engine here sends them.

    Args:
        inner: the group that sends.
        comm: the communicator over the same ranks, in whose name the events go to its observers.
        tag_of: what a collective is for.
    """

    def __init__(self, inner: dist.ProcessGroup, comm: Communicator, tag_of: TagOf) -> None:
        super().__init__(comm.rank, comm.num_ranks)  # type: ignore[call-arg]
        self._inner: dist.ProcessGroup | None = inner
        self._comm: Communicator | None = comm
        self._tag_of = tag_of
        self._backend = dist.get_backend(inner)
        self._is_gloo = self._backend == "gloo"
        self.times: _Times = HostTimes(GLOO_THREADS) if self._is_gloo else StreamTimes()
        self._name = ""
        self.left_to_torch: list[tuple[CollectiveEvent, tuple[Observer, ...]]] = []  # C++ waits for them

    def getBackendName(self) -> str:  # noqa: N802
        """Not 'gloo': at that name torch looks for a gloo backend inside this group."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        """The name under which DTensor finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch when the group is made."""
        self._name = name

    def end_waits(self) -> None:
        """C++ has waited for all that it was left to wait for.

        It begins to wait when it has nothing more to send, and waits for one after the other in the order of issue:
        what has ended meanwhile is not waited for.
        """
        left, self.left_to_torch = self.left_to_torch, []
        now_ns = max((event.issue_ns for event, _ in left), default=0)
        for event, observers in left:
            self.times.ended(event, observers)
            if event.device_times is None and event.end_ns > now_ns:
                event.wait_start_ns, event.wait_end_ns = now_ns, event.end_ns
                now_ns = event.end_ns
            for observer in observers:
                observer.waited(event)

    def close(self) -> None:
        """Let go of the group that sends and its threads: torch may hold this one for ever, from C++."""
        self._inner = self._comm = None

    def _pass_on(self, name: str, verb: _Verb, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        inner, comm = self._inner, self._comm
        if inner is None or comm is None:
            raise RuntimeError(f"mesh: it is closed, and {verb.op} was to be sent over it")
        whole = list(_flat(verb.whole(*args)))  # (options come by name, tensors do not)
        scratch_bytes = sum(tensor.nbytes for tensor in whole) if self._is_gloo and verb.gloo_copies else 0
        tag = self._tag_of(verb.op)
        event = comm.announce(verb.op, whole, tag, scratch_bytes=scratch_bytes, transport=self._backend)
        observers = comm.observers
        work = self.times.follow(lambda: getattr(inner, name)(*args, **kwargs), event, observers)
        return OverheardWork(work, event, observers, self, keep=args)


class OverheardWork(dist.Work):
    """A collective under way, as torch's engines hold it."""

    def __init__(
        self,
        inner: dist.Work,
        event: CollectiveEvent,
        observers: tuple[Observer, ...],
        group: OverheardGroup,
        keep: object,
    ) -> None:
        super().__init__()
        self._inner, self._event, self._observers, self._group = inner, event, observers, group
        self._keep = keep  # StreamTimes has waited already, and NCCL keeps its tensors only until the first wait

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the result may be used. (Torch reads 0 as 'the group's own timeout'.)"""
        began_ns = perf_counter_ns()
        done: bool = self._inner.wait(timeout)
        self._keep = None
        self._group.times.ended(self._event, self._observers)
        self._event.wait_start_ns, self._event.wait_end_ns = began_ns, perf_counter_ns()
        for observer in self._observers:
            observer.waited(self._event)
        return done

    def get_future(self) -> "torch.futures.Future[Any]":
        """Asked for by C++, which then waits on it unseen."""
        self._group.left_to_torch.append((self._event, self._observers))
        return self._inner.get_future()

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return bool(self._inner.is_completed())


class _Times(Protocol):
    """Finds out when a collective began and ended."""

    def follow(
        self, call: Callable[[], dist.Work], event: CollectiveEvent, observers: tuple[Observer, ...]
    ) -> dist.Work:
        """Issue it and follow it."""

    def ended(self, event: CollectiveEvent, observers: tuple[Observer, ...]) -> None:
        """Whoever waited for it goes on."""


class HostTimes:
    """gloo: threads take collectives in the order of issue, so one begins when it is issued or a thread gets free.

    Args:
        num_threads: of the group.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_free = num_threads
        self._queued: deque[tuple[CollectiveEvent, tuple[Observer, ...]]] = deque()
        self._lock = threading.Lock()  # the end of a collective is told in gloo's thread

    def follow(
        self, call: Callable[[], dist.Work], event: CollectiveEvent, observers: tuple[Observer, ...]
    ) -> dist.Work:
        """Issue it; torch calls back at its end."""
        with self._lock:
            self._queued.append((event, observers))
        self._begin_next()
        work = call()
        with contextlib.suppress(RuntimeError):  # gloo's reduce-scatter has no future: it ends when it is waited for
            work.get_future().add_done_callback(lambda _: self.ended(event, observers))
        return work

    def ended(self, event: CollectiveEvent, observers: tuple[Observer, ...]) -> None:
        """Its result is there; told by gloo's thread or, if that comes first, by whoever has waited."""
        with self._lock:
            if not isnan(event.end_ns):
                return
            event.end_ns = perf_counter_ns()
            self._num_free += 1
        for observer in observers:
            observer.completed(event)
        self._begin_next()

    def _begin_next(self) -> None:
        with self._lock:
            if not self._num_free or not self._queued:
                return
            self._num_free -= 1
            event, observers = self._queued.popleft()
        event.start_ns = perf_counter_ns()
        for observer in observers:
            observer.started(event)


class StreamTimes:
    """NCCL: a stream that waits for what NCCL's own stream waits for sees a collective begin and end as that does."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def follow(
        self, call: Callable[[], dist.Work], event: CollectiveEvent, observers: tuple[Observer, ...]
    ) -> dist.Work:
        """Issue it between two CUDA events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        begin.record(self._stream)
        work = call()
        with torch.cuda.stream(self._stream):
            work.wait()
            end.record()
        event.device_times = (begin, end)
        for observer in observers:
            observer.started(event)
        return work

    def ended(self, event: CollectiveEvent, observers: tuple[Observer, ...]) -> None:
        """The current stream waits for it."""
        for observer in observers:
            observer.completed(event)


def overheard_backend(options: Any, make: Callable[[], OverheardGroup]) -> OverheardGroup:  # noqa: ARG001
    """What torch calls to make a group of backend 'overheard': ``pg_options`` of ``new_group`` makes it."""
    return make()


def register_backend() -> None:
    """Make backend 'overheard' known to torch; once a process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, overheard_backend, extended_api=True, devices=["cpu", "cuda"])


def _flat(tensors: Any) -> Iterable[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        for entry in tensors:
            yield from _flat(entry)
