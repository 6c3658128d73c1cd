"""Bytes by role: what is held at rest, and the peak inside one traced step.

At rest the engine says which tensors it holds and why; each storage counts once, in the first role that names it.
What no engine, module or optimizer refers to is unattributed: the batch, a data set in memory, saved metrics, a leak.
Tensors that only C++ refers to are not found; in the memory of the process they belong to the heap.

Inside a traced step a dispatch mode sees every storage an operation makes and, by a weak reference, when it is
freed. The log of these events is replayed after the step, when the role of each storage is known: a storage that ends
up as a gradient counts as a gradient from its first byte. Of the rest, what forward makes is activation, also when
backward runs that forward again (checkpointing; recognised by enabled gradients, which backward itself disables). What
backward and the optimizer make is other: temporaries, gradients of activations, and gradients of parameters that are
gone by the end of the step, as the whole ones are that ZeRO-3 and FSDP reduce. Exact to the byte is what operations
return; scratch memory inside an operation, and the states of random generators that checkpointing keeps, come on top.
The log leaves out storages that
existed before the step and have no role; at rest they are unattributed. The communicator's
events give the scratch memory of the transports. Every entry names the unit that was running, so that the peak has a
place in the model and memory can be drawn over the step. Tracing makes a step about three times slower, so its times
are left out of the statistics. On CUDA the ledger knows tensors only, the allocator the rest
(``process_memory.py``), and tensors in host memory count only if the engine has offloaded them.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, count, groupby
from math import inf
from time import perf_counter_ns
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public way to see every operation

from shardlab.comm import CollectiveEvent, Observer
from shardlab.vocabulary import WHOLE_MODEL, Collective, MeshAxis, Phase, Role

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_MOVES = {
    Collective.ALL_GATHER: Role.GATHERED_PARAMETER,
    Collective.REDUCE_SCATTER: Role.GRADIENT,
    Collective.ALL_REDUCE: Role.GRADIENT,
}
LiveTensors = Mapping[Role, Iterable[Tensor]]
ByRole = dict[Role, int]


def known_tensors() -> Iterator[Tensor]:
    """Every plain tensor with a storage that the garbage collector lists; it does not list what ``gc.freeze`` froze."""
    # In a rank, all objects from before its first call are frozen, so there are only a few thousand to search.
    return (part for thing in gc.get_objects() if type(thing) in PLAIN for part in with_storage(thing))


def with_storage(tensor: Tensor) -> tuple[Tensor, ...]:
    """In whose memory the tensor lies: its own, that of a sparse one's indices and values, or, as of meta, in none."""
    # Private: a tensor inside torch.func.vmap or grad looks plain, and there is no public way to tell.
    if tensor.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return ()
    match tensor.layout:
        case torch.strided:
            return (tensor,)
        case torch.sparse_coo:  # Private: the public ones refuse a gradient that nobody has coalesced.
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.detach().values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.detach().values()
    return ()


def with_unattributed(live: LiveTensors) -> LiveTensors:
    """The tensors by role, and last all others in host memory; a storage counts in the first role that names it."""
    if Role.UNATTRIBUTED in live:  # the caller has looked for them already
        return live
    return {**live, Role.UNATTRIBUTED: [tensor for tensor in known_tensors() if tensor.is_cpu]}


def on_device(live: LiveTensors, device_type: str) -> dict[Role, list[Tensor]]:
    """The tensors on the device and the offloaded ones; others in host memory, such as step counters, are left out."""
    return {
        role: [tensor for tensor in tensors if role is Role.OFFLOADED or tensor.device.type == device_type]
        for role, tensors in live.items()
    }


def storages_by_role(live: LiveTensors) -> dict[int, tuple[Role, int]]:
    """Role and bytes of each storage, by its address-like key; a storage named twice has the first role."""
    found: dict[int, tuple[Role, int]] = {}
    for role, tensors in live.items():
        for storage in _storages(tensors):
            found.setdefault(storage._cdata, (role, storage.nbytes()))
    return found


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (part.untyped_storage() for tensor in tensors for part in with_storage(tensor))


def bytes_by_role(live: LiveTensors) -> ByRole:
    """Live bytes of every role, each storage once; roles that hold nothing are 0."""
    held = dict.fromkeys(Role, 0)
    for role, num_bytes in storages_by_role(live).values():
        held[role] += num_bytes
    return held


@dataclass(frozen=True)
class Moment:
    """A moment of a traced step: when, in which phase and unit, and the bytes of every role then."""

    time_ns: int
    phase: Phase
    unit: str
    by_role: ByRole

    @property
    def num_bytes(self) -> int:
        """All roles on the device together."""
        return sum(num_bytes for role, num_bytes in self.by_role.items() if role is not Role.OFFLOADED)


@dataclass(frozen=True)
class _Change:
    key: int
    num_bytes: int  # negative when freed
    time_ns: int
    phase: Phase
    unit: str


class MemoryLedger(TorchDispatchMode, Observer):
    """Logs every storage made and freed in this thread while it is entered.

    Args:
        live: the engine's tensors at the start.
        device_type: where the tensors are that count: "cpu" or "cuda".
    """

    def __init__(self, live: LiveTensors, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.phase = Phase.DATA
        self.unit = WHOLE_MODEL
        self._log: list[_Change] = []
        self._known: dict[int, int] = {}  # key of a live storage -> its serial number: keys are used again
        self._num_bytes: dict[int, int] = {}  # of a live storage, by serial number
        self._is_activation: set[int] = set()  # by birth: counts if nothing else is known of it
        self._roles: dict[int, Role] = {}
        self._elsewhere: set[int] = set()  # made on another device: counts once it has a role
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # of a live storage, by its key
        self.num_operations = 0
        """How many ran in forward and backward."""
        self._serials = count()
        self._scratch = next(self._serials)
        self._roles[self._scratch] = Role.COMMUNICATION_BUFFER
        self.hold(live)

    def hold(self, live: LiveTensors) -> None:
        """Log tensors that were there before."""
        for role, tensors in live.items():
            for storage in _storages(tensors):
                if storage._cdata not in self._known:  # the first role that names it counts
                    self._roles[self._enter_storage(storage)] = role

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and log the storages of its results."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others (DTensor) dispatches again with the plain ones inside
        self.num_operations += self.phase in (Phase.FORWARD, Phase.BACKWARD)
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else (result,):
            for storage in _storages([value] if type(value) in PLAIN else ()):
                if storage._cdata not in self._known:
                    serial = self._enter_storage(storage)
                    if value.device.type != self._device_type:
                        self._elsewhere.add(serial)
        return result

    def __enter__(self) -> Self:
        """Begin to log, also storages that are resized in place, which no operation shows (torch's FSDP2 does it)."""
        self._resize = resize = torch.UntypedStorage.resize_

        def logged(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = resize(storage, num_bytes)
            self._resized(storage)
            return result

        setattr(torch.UntypedStorage, "resize_", logged)  # noqa: B010  (as an assignment it has no type)
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        # Weak references still report what is freed, but from now on that is not part of the step.
        self._closed = True

    def resume(self) -> None:
        """Log what is freed, though it is not entered: it will be again."""
        self._closed = False

    _closed = False

    def classify(self, live: LiveTensors) -> Self:
        """Say what the storages made so far have become; called while the engine holds them."""
        for key, (role, _) in storages_by_role(live).items():
            if key in self._known:
                self._roles[self._known[key]] = role
        return self

    def issued(self, event: CollectiveEvent) -> None:
        """Give the buffer a role by its collective: gathered buffers are parameters, reduced buffers are gradients."""
        serial = self._known.get(event.storage)
        moves = event.op in _MOVES and event.axis != MeshAxis.TENSOR  # over the tensor axis travel activations
        if serial is not None and moves and self.phase in (Phase.FORWARD, Phase.BACKWARD):
            # Only without a role: what the engine says of a storage comes before what a collective suggests.
            self._roles.setdefault(serial, _MOVES[event.op])

    def started(self, event: CollectiveEvent) -> None:
        """A transport takes its scratch (called from the queue's thread)."""
        self._note(self._scratch, event.scratch_bytes)

    def completed(self, event: CollectiveEvent) -> None:
        """A transport gives its scratch back."""
        self._note(self._scratch, -event.scratch_bytes)

    def moments(self) -> list[Moment]:
        """The course of the step: the highest and the last moment of each stretch in one unit and phase, in order."""
        found: list[Moment] = []
        held, now_bytes = dict.fromkeys(Role, 0), 0  # in all, on the device
        counting = ((change, role) for change in self._log if (role := self._role_of(change.key)) is not None)
        for (phase, unit), changes in groupby(counting, key=lambda pair: (pair[0].phase, pair[0].unit)):
            most_bytes, is_highest, time_ns = -inf, False, 0
            for change, role in changes:
                held[role] += change.num_bytes
                now_bytes += change.num_bytes if role is not Role.OFFLOADED else 0
                time_ns, is_highest = change.time_ns, now_bytes > most_bytes
                if is_highest:  # only of these the roles are needed
                    most_bytes, highest = now_bytes, Moment(time_ns, phase, unit, dict(held))
            found += [highest] if is_highest else [highest, Moment(time_ns, phase, unit, dict(held))]
        return found

    def held_bytes(self) -> list[int]:
        """What is held on the device after each change, in order: a curve, whose highest value is that of the peak."""
        left_out = (None, Role.OFFLOADED)
        return list(accumulate(each.num_bytes for each in self._log if self._role_of(each.key) not in left_out))

    def peak(self) -> Moment:
        """The first of the highest moments."""
        return max(self.moments(), key=lambda moment: moment.num_bytes)

    def _role_of(self, serial: int) -> Role | None:
        if serial in self._roles:
            return self._roles[serial]
        if serial in self._elsewhere:
            return None
        return Role.ACTIVATION if serial in self._is_activation else Role.OTHER

    def _enter_storage(self, storage: torch.UntypedStorage) -> int:
        """Note that it is there; its serial number. A weak reference says when it goes, as a gradient may in a step."""
        # Tensors outlive the ledger, so the callback must not keep it or its log alive.
        ledger, key, serial = weakref.ref(self), storage._cdata, next(self._serials)
        self._known[key] = serial
        self._num_bytes[serial] = storage.nbytes()
        if self.phase is Phase.FORWARD or _recomputes():
            self._is_activation.add(serial)
        self._note(serial, storage.nbytes())

        def freed(_: object) -> None:
            if (alive := ledger()) is not None:
                alive._freed(key)

        self._watches[key] = weakref.ref(storage, freed)
        return serial

    def _freed(self, key: int) -> None:
        # The key may be used again by the next storage, so it is forgotten before anything else.
        self._watches.pop(key, None)
        serial = self._known.pop(key, None)
        if serial is not None and not self._closed:
            self._change(serial, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        serial = self._known.get(storage._cdata)
        if serial is not None:
            self._change(serial, storage.nbytes())
        else:
            self._enter_storage(storage)

    def _change(self, serial: int, num_bytes: int) -> None:
        before, self._num_bytes[serial] = self._num_bytes[serial], num_bytes
        self._note(serial, num_bytes - before)

    def _note(self, serial: int, num_bytes: int) -> None:
        self._log.append(_Change(serial, num_bytes, perf_counter_ns(), self.phase, self.unit))


def _recomputes() -> bool:
    """Whether a forward runs inside backward: autograd's own work there is done with gradients disabled."""
    # Private: there is no public way to tell that a backward is under way in this thread.
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
