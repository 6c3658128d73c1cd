"""Every collective that torch.distributed sends in this process, told to an observer, whoever called it.

Each is an operation of torch's dispatcher (``c10d::allreduce_`` and so on): a script's own ``dist.all_reduce``, those
of FSDP2 and DTensor, and those that DDP sends from C++. Inside ``TorchCalls`` a kernel of ours stands at the key
BackendSelect, which a call passes last before the group's own kernel: it notes the call and passes it on. So groups,
their ``Work`` and what travels stay torch's own; groups made before are seen too, and at the end all is as it was.

Waits are seen where Python waits (``Work.wait``) and where a functional collective is waited for. Where C++ waits (DDP,
in forward for its buffers and at the end of backward) ``end_waits`` infers them. Not seen: collectives in a group of
one, which moves nothing, and those that a group does without the dispatcher (a coalescing group of NCCL).
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from math import isnan
from time import perf_counter_ns
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
import torch.distributed as dist

from shardlab.comm.events import CollectiveEvent, Observer, Observers
from shardlab.comm.observed_group import ObservedGroup
from shardlab.comm.torch_engine_groups import BELOW, Verb, announce, kernels, operations
from shardlab.comm.torch_times import FutureTimes, HostTimes, Times, complete_waits
from shardlab.comm.transports.base import Transport
from shardlab.comm.trees import tensors_in
from shardlab.recording.torch_callers import Caller, axis_of, backend_of, caller_of
from shardlab.vocabulary import Collective

TagOf = Callable[[Collective, Caller, Sequence[torch.Tensor]], str]
T = TypeVar("T")


class _Sent(NamedTuple):
    event: CollectiveEvent
    observers: Observers
    times: Times
    output: int  # identity of the storage that has the result
    waits_in_cpp: bool


class _Sender(NamedTuple):
    """Torch's group for one type of device, as events name it."""

    group: ObservedGroup
    backend: str
    times: Times


class TorchCalls:
    """Inside, ``observer`` is told of every collective of torch.distributed.

    Args:
        observer: gets the events, see ``Observer``.
        tag_of: what a collective is for.
    """

    def __init__(self, observer: Observer, tag_of: TagOf) -> None:
        self._observer, self._tag_of = observer, tag_of
        self._senders: dict[tuple[str, str], _Sender] = {}
        # The Work itself is the key: as long as it is here, torch hands the caller this very object.
        self._sent: dict[dist.Work, _Sent] = {}
        self._work_of: dict[int, dist.Work] = {}  # by the storage of its result
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin to tell."""
        library = self._stack.enter_context(kernels("c10d"))
        for name, op, verb in operations():
            library.impl(name, self._kernel(op, verb), "BackendSelect", with_keyset=True)
        functional = self._stack.enter_context(kernels("_c10d_functional"))
        functional.impl("wait_tensor", self._wait_tensor, "BackendSelect", with_keyset=True)
        plain, calls = dist.Work.wait, self

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            return calls._wait(work, lambda: bool(plain(work, *args, **kwargs)))

        setattr(dist.Work, "wait", wait)  # noqa: B010  (as an assignment it has no type)
        self._stack.callback(setattr, dist.Work, "wait", plain)
        return self

    def __exit__(self, *_: object) -> None:
        """Tell no more."""
        self._stack.close()
        self._sent.clear()
        self._work_of.clear()

    def end_waits(self) -> None:
        """Complete the events of the collectives that C++ has waited for by now."""
        left = {work: sent for work, sent in self._sent.items() if sent.waits_in_cpp}
        for work in left:
            self._forget(work)
        complete_waits((sent.times, sent.event, sent.observers) for sent in left.values())

    def forget_ended(self) -> None:
        """Hold collectives no longer that have ended and that nobody has waited for."""
        # A Work keeps its tensors: one that nobody waits for would hold them until the end.
        for work in [work for work, sent in self._sent.items() if not isnan(sent.event.end_ns)]:
            self._forget(work)

    def _kernel(self, op: Any, verb: Verb) -> Callable[..., Any]:
        names = [argument.name for argument in op._schema.arguments]
        root = names.index("root_rank") if "root_rank" in names else None
        splits = names.index("input_split_sizes") if "input_split_sizes" in names else None

        def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in(args[verb.place]))
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            caller = caller_of(sys._getframe().f_back)
            sender = self._sender(dist.ProcessGroup.unbox(group), tensors, caller, verb.op)
            if sender is None:
                return op.redispatch(keys & BELOW, *args, **kwargs)
            tensors = [] if verb.op is Collective.BARRIER else tensors
            event = announce(
                sender.group, verb, tensors, self._tag_of(verb.op, caller, tensors), sender.backend,
                sizes=() if splits is None else args[splits], root=None if root is None else args[root],
            )  # fmt: skip
            observers, result = sender.group.observers, None

            def send() -> dist.Work | None:
                nonlocal result
                result = op.redispatch(keys & BELOW, *args, **kwargs)
                # NCCL returns none for ``async_op=False``, whatever the annotation says.
                return cast("dist.Work | None", dist.Work.unbox(result[-1] if isinstance(result, tuple) else result))

            work = sender.times.follow(send, event, observers)
            if work is None:
                return result
            output = next(tensors_in(args[0]), None)
            key = 0 if output is None or output.is_sparse else output.untyped_storage()._cdata
            self._sent[work] = _Sent(event, observers, sender.times, key, caller.waits_in_cpp)
            self._work_of[key] = work
            return result

        return call

    def _sender(
        self, group: dist.ProcessGroup, tensors: list[torch.Tensor], caller: Caller, op: Collective
    ) -> _Sender | None:
        """How events name the group; None for a group of one, and for tensors without data."""
        device = tensors[0].device if tensors else torch.device("cpu")
        if group.size() == 1 or device.type == "meta":
            return None
        key = (group.group_name, device.type)
        if key not in self._senders:
            ranks = tuple(dist.get_process_group_ranks(group))
            observed = ObservedGroup(cast(Transport, _Torchs()), ranks, group.rank(), axis_of(group, caller, op))
            self._stack.enter_context(observed.observed_by(self._observer))
            times: Times = FutureTimes() if device.type == "cuda" else HostTimes()
            self._stack.callback(times.close)
            self._senders[key] = _Sender(observed, backend_of(group, device), times)
        return self._senders[key]

    def _wait_tensor(self, keys: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
        work = self._work_of.get(tensor.untyped_storage()._cdata) if tensor.device.type != "meta" else None
        plain = torch.ops._c10d_functional.wait_tensor.default.redispatch
        return self._wait(work, lambda: cast(torch.Tensor, plain(keys & BELOW, tensor)))

    def _wait(self, work: dist.Work | None, wait: Callable[[], T]) -> T:
        sent = None if work is None else self._sent.get(work)
        if work is None or sent is None:  # waited for before, or sent before anyone observed
            return wait()
        began_ns, event = perf_counter_ns(), sent.event
        result = sent.times.wait(wait, event)
        self._forget(work)
        sent.times.ended(event, sent.observers)
        event.wait_start_ns, event.wait_end_ns = began_ns, perf_counter_ns()
        for observer in sent.observers:
            observer.waited(event)
        return result

    def _forget(self, work: dist.Work) -> None:
        sent = self._sent.pop(work)
        # A later collective may have its result in the same storage, and is still to be waited for.
        if self._work_of.get(sent.output) is work:
            del self._work_of[sent.output]


class _Torchs:
    """Stands for a transport: torch's own group sends."""

    name, emulated = "torch", False
