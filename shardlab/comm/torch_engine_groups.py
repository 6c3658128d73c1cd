"""Process groups for torch's own engines, which make the same events as a communicator does.

``DistributedDataParallel``, ``fully_shard`` and DTensor call torch's process groups themselves, partly from C++. So
they get a process group that passes every call on to the real one and tells the communicator's observers of it. Torch's
public way to have a group of one's own is a registered backend; ``torch_group`` makes the group through it.

Issue and, where torch waits through Python, the wait are seen as they happen. Where C++ waits (DDP, at the end of
backward) ``end_waits`` infers it. ``torch_times`` finds out when a collective began and ended. Torch's gloo groups
hold a copy of the whole buffer in a reduce-scatter and an all-gather, as torch's own profiler shows (torch 2.11 and
2.13): that is their ``scratch_bytes``. What they send is in ``partition.ring_cost``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial, partialmethod
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardlab.comm.base_mesh import BaseMesh, groups_along
from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Observers
from shardlab.comm.observed_group import ObservedGroup, Process
from shardlab.comm.rank_life import retire
from shardlab.comm.torch_times import HostTimes, StreamTimes, Times, complete_waits
from shardlab.comm.trees import tensors_in
from shardlab.partition.ring_cost import moved_bytes
from shardlab.vocabulary import Collective

BACKEND = "observed"
TagOf = Callable[[Collective], str]


def check_torch_engines(device_type: str, backend: str) -> None:
    """Raise ValueError unless torch's own engines can send between these ranks: only our transports are staged.

    Args:
        device_type: of the ranks, ``cpu`` or ``cuda``.
        backend: of torch.distributed, on these ranks.
    """
    if device_type == "cuda" and backend != "nccl":
        raise ValueError(
            "device: torch's own engines send by NCCL, and here ranks share a GPU (or torch is built without NCCL); "
            "leave these engines out, take fewer ranks, set NCCL_MULTI_RANK_GPU_ENABLE=1 (from NCCL 2.30 on), or use "
            "device='cpu'"
        )


def torch_group(mesh: BaseMesh, axis: str, tag_of: TagOf | None) -> dist.ProcessGroup:
    """A process group along an axis for torch's own engines; collective over all ranks of the default group.

    Args:
        mesh: over all of these ranks; closing it ends the group.
        axis: of the mesh.
        tag_of: says what a collective is for; then each is told to the observers of the axis. None for torch's plain
            group.

    Raises:
        ValueError: there is no default group, the mesh leaves ranks out, or torch cannot send as the mesh does.
    """
    comm = mesh[axis]
    if not dist.is_initialized() or len(mesh.ranks) != dist.get_world_size():
        raise ValueError("mesh: torch's own engines need a mesh over all ranks of a RankPool, launch or torchrun")
    if comm.emulated:
        raise ValueError("link: torch's own engines send past the emulated link; leave it out")
    check_torch_engines(mesh.device.type, dist.get_backend())
    own: list[dist.ProcessGroup] = []
    for ranks in groups_along(mesh.axes, mesh.ranks, axis):
        # Every rank must take part in making every group, also of groups it does not belong to.
        plain = dist.new_group(list(ranks), timeout=Process.timeout)
        observed = None
        if tag_of is not None and len(ranks) > 1:
            if not hasattr(dist.Backend, BACKEND.upper()):  # once a process
                dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
            make = partial(TorchGroup, plain, comm, tag_of)
            observed = dist.new_group(list(ranks), timeout=Process.timeout, backend=BACKEND, pg_options=make)
        if comm.ranks == ranks:
            # In the order in which they are destroyed: the observed group sends through the plain one.
            own = [plain] if observed is None else [observed, plain]
    mesh.call_at_close(partial(_retire, own))
    return own[0]


def _retire(groups: list[dist.ProcessGroup]) -> None:
    """Close the groups now and destroy them when the next mesh is built, as ``comm.observed_group`` says."""
    for group in groups:
        if isinstance(group, TorchGroup):
            group.close()
    retire(*(partial(dist.destroy_process_group, group) for group in groups))


def _make_group(options: Any, make: Callable[[], "TorchGroup"]) -> "TorchGroup":  # noqa: ARG001
    """What torch calls to make a group of backend 'observed': ``pg_options`` of ``new_group`` makes it."""
    return make()


class Verb(NamedTuple):
    """How torch calls a collective.

    Attributes:
        op: the collective.
        place: of the whole (unsharded) tensors among the arguments, nested as torch has them; a barrier has none.
        gloo_copies: whether torch's gloo group holds a copy of the whole buffer meanwhile.
        of_parts: the tensors there are one rank's part of the whole.
        sizes: place among the arguments of the rows for each rank, where they may be uneven; not for the dispatcher.
    """

    op: Collective
    place: int
    gloo_copies: bool = False
    of_parts: bool = False
    sizes: int | None = None


# A verb has another name from Python, from C++, from the dispatcher (which adds "_") and before torch 2.13; each torch
# calls those that it knows. A barrier has a tensor only so that torch can tell the device.
_NAMES = {
    Verb(Collective.ALL_REDUCE, 0): ("allreduce", "allreduce_coalesced"),
    Verb(Collective.BROADCAST, 0): ("broadcast",),
    Verb(Collective.REDUCE, 0): ("reduce",),
    Verb(Collective.ALL_GATHER, 0): (
        "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    ),
    Verb(Collective.ALL_GATHER, 0, gloo_copies=True): ("_allgather_base", "all_gather_single"),
    Verb(Collective.REDUCE_SCATTER, 1): (
        "reduce_scatter", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    ),
    Verb(Collective.REDUCE_SCATTER, 1, gloo_copies=True): ("_reduce_scatter_base", "reduce_scatter_single"),
    Verb(Collective.ALL_TO_ALL, 1): ("alltoall",),
    Verb(Collective.ALL_TO_ALL, 1, sizes=3): ("alltoall_base", "all_to_all_single"),
    Verb(Collective.GATHER, 1, of_parts=True): ("gather",),
    Verb(Collective.SCATTER, 0, of_parts=True): ("scatter",),
    Verb(Collective.SEND, 0): ("send",),
    Verb(Collective.RECV, 0): ("recv", "recv_anysource", "recv_any_source"),
    Verb(Collective.BARRIER, 0): ("barrier",),
}  # fmt: skip
VERBS = {name: verb for verb, names in _NAMES.items() for name in names}

# What a kernel at BackendSelect passes a call on to: the group's own. Private: there is no public way to see the calls
# that torch's own functions make, or DDP from C++.
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def operations() -> Iterator[tuple[str, Any, Verb]]:
    """The collectives of this torch's dispatcher: name, operation, and how it is called."""
    for plain, verb in VERBS.items():
        for name in (plain, f"{plain}_"):
            if (op := getattr(torch.ops.c10d, name, None)) is not None:
                yield name, op.default, verb


def kernels(namespace: str) -> AbstractContextManager[torch.library.Library]:
    """Kernels of ours for torch's operations; they go when the context is left."""
    # Private: a library that is made in public stays for ever.
    return torch.library._scoped_library(namespace, "IMPL")


def announce(
    group: ObservedGroup, verb: Verb, tensors: Sequence[torch.Tensor], tag: str, backend: str, *,
    sizes: Sequence[int] = (), root: int | None = None,
) -> CollectiveEvent:  # fmt: skip
    """Tell the observers of a group of a collective that torch itself sends.

    Args:
        group: in which it is sent.
        verb: how it is called.
        tensors: the whole ones, or this rank's part.
        tag: what it is for.
        backend: of torch, which sends.
        sizes: of an all-to-all, rows for each rank; empty for equal parts.
        root: of the collectives that have one.
    """
    numel = sum(map(torch.Tensor.numel, tensors)) if any(one.is_sparse for one in tensors) else None
    if numel is not None:  # torch gathers the indices and values that each rank has, without doubles, and adds them up
        verb = Verb(Collective.ALL_GATHER, 0, of_parts=True)
        tensors = [part for one in tensors for part in (one.coalesce().values(), one.coalesce().indices())]
    kept = bytes_kept(tensors, sizes, group) if verb.op is Collective.ALL_TO_ALL else None
    event = group.announce(
        verb.op, tensors, tag, own_chunk_bytes=kept, transport=backend, parts=group.num_ranks if verb.of_parts else 1,
        scratch_bytes=sum(tensor.nbytes for tensor in tensors) if verb.gloo_copies and backend == "gloo" else 0,
    )  # fmt: skip
    event.numel = event.numel if numel is None else numel  # ranks have unlike numbers of rows
    event.torch_moves = moved_bytes(
        backend, verb.op, event.num_bytes, group.num_ranks, group.rank, root, own_chunk_bytes=kept
    )
    return event


def bytes_kept(tensors: Sequence[torch.Tensor], sizes: Sequence[int], group: ObservedGroup) -> int | None:
    """Bytes of an all-to-all that a rank keeps, since they are for itself; None where it sends all ranks as many.

    Args:
        tensors: one for each rank, or one whose rows are divided among them.
        sizes: rows for each rank; empty for equal parts.
        group: in which it is sent.
    """
    if len(tensors) > 1:
        return tensors[group.rank].nbytes
    if len(sizes) != group.num_ranks or min(sizes) < 0:  # equal parts, or what torch is about to refuse
        return None
    return sum(tensor.nbytes for tensor in tensors) * sizes[group.rank] // max(1, sum(sizes))


class TorchGroup(dist.ProcessGroup):
    """A process group that passes every call on to ``inner`` and tells observers of it.

    Torch refuses the verbs that are not in the table above (scatter, gather, reduce): no engine here sends them.

    Args:
        inner: the group that sends.
        comm: the communicator over the same ranks, whose observers get the events.
        tag_of: what a collective is for.
    """

    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def __init__(self, inner: dist.ProcessGroup, comm: Communicator, tag_of: TagOf) -> None:
        super().__init__(comm.rank, comm.num_ranks)  # type: ignore[call-arg]
        self._inner: dist.ProcessGroup | None = inner
        self._comm: Communicator | None = comm
        self._tag_of = tag_of
        self._backend = dist.get_backend(inner)
        self.times: Times = HostTimes() if self._backend == "gloo" else StreamTimes()
        self._name = ""
        self.left_to_torch: list[tuple[CollectiveEvent, Observers]] = []  # C++ waits for them

    def _get_backend(self, device: torch.device) -> Any:
        """What sends for a device; torch asks it what it can do besides, where the default group is bound to a GPU."""
        return self

    def getBackendName(self) -> str:  # noqa: N802
        """A name of its own: for 'gloo' torch would look for a gloo backend inside this group."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        """The name under which DTensor finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch when the group is made."""
        self._name = name

    def end_waits(self) -> None:
        """Complete the records of the collectives that C++ waited for; called when it has returned."""
        left, self.left_to_torch = self.left_to_torch, []
        complete_waits((self.times, event, observers) for event, observers in left)

    def close(self) -> None:
        """Let go of the inner group, gloo's threads and observers: torch may hold this object for ever, from C++."""
        self._inner = self._comm = None
        self.left_to_torch = []
        self.times.close()
        # Collectives that are still followed hold their observers, and through them an engine with all its memory.
        self.times = HostTimes()

    def _pass_on(self, name: str, verb: Verb, /, *args: Any, **kwargs: Any) -> "TorchWork":
        inner, comm = self._inner, self._comm
        if inner is None or comm is None:
            raise RuntimeError(f"mesh: it is closed, so {verb.op} cannot be sent; build a new mesh")
        # Options come by name, tensors do not.
        whole = [] if verb.op is Collective.BARRIER else list(tensors_in(args[verb.place]))
        sizes = () if verb.sizes is None else args[verb.sizes]
        root = getattr(args[1], "rootRank", None) if len(args) > 1 else None
        event = announce(comm, verb, whole, self._tag_of(verb.op), self._backend, sizes=sizes, root=root)
        observers = comm.observers
        # The inner group does the work; torch gets a Work of ours, so that the wait can be seen. Never None, which NCCL
        # returns for ``async_op=False``: C++ cannot take it from a group written in Python.
        work = self.times.follow(lambda: getattr(inner, name)(*args, **kwargs), event, observers)
        return TorchWork(work, event, observers, self, keep=args)


# A method for each verb this torch has.
for _name, _verb in VERBS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(TorchGroup, _name, partialmethod(TorchGroup._pass_on, _name, _verb))


class TorchWork(dist.Work):
    """A collective under way, as torch's engines wait for it; without ``inner`` nobody has to wait any more."""

    def __init__(
        self, inner: dist.Work | None, event: CollectiveEvent, observers: Observers, group: TorchGroup, keep: object
    ) -> None:
        super().__init__()
        self._inner, self._event, self._observers, self._group = inner, event, observers, group
        self._keep = keep  # StreamTimes has waited already, and NCCL keeps its tensors only until the first wait

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the result may be used. (Torch reads 0 as 'the group's own timeout'.)"""
        inner, done, began_ns = self._inner, True, perf_counter_ns()
        if inner is not None:
            try:
                done = self._group.times.wait(lambda: inner.wait(timeout), self._event)
            finally:  # one that failed is not under way either
                self._group.times.ended(self._event, self._observers)
        # Not after a wait that failed: the transport may still write into what is kept.
        self._keep = None
        self._event.wait_start_ns, self._event.wait_end_ns = began_ns, perf_counter_ns()
        for observer in self._observers:
            observer.waited(self._event)
        return done

    def get_future(self) -> "torch.futures.Future[Any]":
        """Called by C++, which then waits on the future where Python cannot see it."""
        if self._inner is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(None)
            return done
        self._group.left_to_torch.append((self._event, self._observers))
        return self._inner.get_future()

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return self._event.has_ended_on_stream if self._inner is None else bool(self._inner.is_completed())
