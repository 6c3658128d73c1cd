"""Groups of ranks: one along an axis, whose collectives are numbered and observed, and what all of a process share.

Whoever started a rank's process says what holds for all its groups: device, timeout, observers. So the hang board
observes every mesh, also one made in a notebook cell that knows nothing of it. Other observers use ``observed_by``.
"""

import contextlib
import gc
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.events import CollectiveEvent, Observer, Observers
from shardlab.comm.transports.base import Transport
from shardlab.vocabulary import Collective, dtype_name

_ROOMS = ("comm", "engines", "faults", "recording", "tensor_parallel", "trace")
_LIBRARY = (*(str(Path(__file__).parent.parent / room) for room in _ROOMS), str(Path(torch.__file__).parent))
_STANDARD_LIBRARY = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen ")
_AUTOGRAD = torch.autograd.graph.__file__
PAST = (
    "sends by torch.distributed itself, which nobody counts; send over self.comm, or over communicators of given.mesh"
)


class Process:
    """Settings of this process, made by whoever started it and kept for its whole life.

    Attributes:
        device: of meshes that name none.
        observers: get the events of every communicator made from now on.
        timeout: torch ends a collective that takes longer with an error; None for torch's default.
        retired: calls that destroy the groups this rank no longer uses. Destroying one while another rank still uses
            it would end that rank's collectives with an unexplained connection error. So they wait until the next mesh
            is built, or a pool calls the next function, which is when all ranks are known to be done.
    """

    device: torch.device = torch.device("cpu")
    observers: Observers = ()
    retired: tuple[Callable[[], object], ...] = ()
    timeout: timedelta | None = None
    patient: dist.ProcessGroup | None = None
    """Of all ranks, where one may wait for another for days; see ``make_patient_group``."""


@contextlib.contextmanager
def observing_new(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` is told of the collectives of every communicator that is made, of whatever mesh."""
    before, Process.observers = Process.observers, (*Process.observers, observer)
    try:
        yield
    finally:
        Process.observers = before


def num_sent_by_torch() -> int:
    """How many collectives the default group has sent: of a step those that went past every communicator."""
    # Private: there is no public way to ask.
    group: Any = dist.group.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())


class ObservedGroup:
    """Numbers the collectives of a group and tells observers of each.

    Args:
        transport: how bytes move; None for a group of one.
        ranks: the global ranks of the group, in group order.
        rank: this process's position in ``ranks``.
        axis: the axis' name, which every event carries.
    """

    def __init__(self, transport: Transport | None, ranks: Sequence[int], rank: int, axis: str) -> None:
        if (transport is None) != (len(ranks) == 1):
            raise ValueError(f"transport: a group of {len(ranks)} ranks needs {'none' if len(ranks) == 1 else 'one'}")
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self._transport = transport
        self._observers: Observers = Process.observers
        self._seq = 0

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """How it is pickled.

        Raises:
            TypeError: it is of several ranks. The copy of a layer that sends would lack the hooks that make the
                gradients of what all ranks have whole.
        """
        if self.num_ranks > 1:
            raise TypeError(
                f"axis {str(self.axis)!r}: a communicator of {self.num_ranks} ranks cannot be copied; copy or save a "
                "tensor-parallel model before parallelize_module(...), and load engine.full_state_dict() into that copy"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Itself, in a group of one, which sends nothing; of several ranks refused, as for a pickle."""
        return self if self.num_ranks == 1 else self.__reduce_ex__(4)

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return len(self.ranks)

    @property
    def transport(self) -> str:
        """How bytes travel, as every event says; empty in a group of one."""
        return "" if self._transport is None else self._transport.name

    @property
    def emulated(self) -> bool:
        """Whether an emulated link delays the collectives."""
        return self._transport is not None and self._transport.emulated

    @property
    def observers(self) -> Observers:
        """Those who get the events of collectives issued now."""
        return self._observers

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Inside, ``observer`` is told of every collective that is issued."""
        # A new tuple each time: collectives in flight keep the observers they were issued with.
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            # Once: the same observer may be there from outside as well.
            at = [known is observer for known in self._observers].index(True)
            self._observers = self._observers[:at] + self._observers[at + 1 :]

    def announce(
        self, op: Collective, buffers: Sequence[Tensor], tag: str, *, own_chunk_bytes: int | None = None,
        scratch_bytes: int = 0, transport: str | None = None, parts: int = 1,
    ) -> CollectiveEvent:  # fmt: skip
        """Tell the observers of a collective that is issued now, by a verb or by torch itself (``script_collectives``).

        Args:
            op: the collective.
            buffers: whole (unsharded) tensors of one dtype that travel together.
            tag: what it is for.
            own_chunk_bytes: bytes of this rank's chunk where chunks are uneven.
            scratch_bytes: what the transport holds meanwhile.
            transport: what sends it, if not this communicator's transport.
            parts: how many such buffers make the whole, where a rank has only its part.
        """
        assert self._transport is not None
        event = CollectiveEvent(
            seq=self._seq, op=op, axis=self.axis, tag=tag, dtype=dtype_name(buffers[0].dtype) if buffers else "",
            numel=parts * sum(buffer.numel() for buffer in buffers),
            num_bytes=parts * sum(buffer.nbytes for buffer in buffers), group_size=self.num_ranks,
            transport=transport or self._transport.name, emulated=self._transport.emulated,
            source_line=_line_of_caller(), own_chunk_bytes=own_chunk_bytes, scratch_bytes=scratch_bytes,
            storage=buffers[0].untyped_storage()._cdata if buffers else 0, ranks=self.ranks,
        )  # fmt: skip
        self._seq += 1
        for observer in self._observers:
            observer.issued(event)
        return event


def become_rank(device: torch.device, timeout: timedelta, *observers: Observer) -> None:
    """Set the device, the timeout and the observers of all meshes made from now on."""
    Process.device, Process.timeout, Process.observers = device, timeout, observers


def retire(*ends: Callable[[], object]) -> None:
    """Have ``ends`` called when the next mesh is built: they destroy groups that this rank no longer uses.

    Not never: a group that stays has gloo's thread, which wakes 100 times a second.
    """
    Process.retired = (*Process.retired, *ends)


def end_retired() -> None:
    """Destroy the groups that no rank uses any more; called when all ranks are known to be done with them."""
    # Forgotten before they are called: a group must not be destroyed twice, even if one of the calls fails.
    ends, Process.retired = Process.retired, ()
    for end in ends:
        end()


def leave_group() -> None:
    """Destroy the default group and the groups of closed meshes; a process calls it last.

    A group that is merely forgotten keeps gloo's threads. One that still holds a tensor when the interpreter ends needs
    it to let go, and that aborts the process ("terminate called without an active exception").
    """
    # Not called one by one: destroying the default group destroys all others with it.
    Process.retired, Process.patient = (), None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what is left of an engine is a cycle: module, hooks, engine, mesh


def make_patient_group() -> None:
    """Make a group of all ranks in which one may wait for another for days; collective over the default group, once."""
    if Process.patient is None:
        Process.patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))


def _line_of_caller() -> str:
    """``file:line`` of the first frame outside the rooms that only pass calls on: the line a person can look at."""
    line = ""
    for frame in callers(sys._getframe().f_back):
        file = frame.f_code.co_filename
        if not _is_standard_library(file):
            line = f"{file}:{frame.f_lineno}"
        if not is_library(file):
            break
    return line


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it, the innermost first; None for a call from C++ without any.

    Autograd does a backward on a device in a thread that begins in C++. There, the frames of the thread that waits in
    ``backward()`` follow.
    """
    last = None
    for last in _outwards(frame):
        yield last
    begins_in_python = last is not None and last.f_code.co_filename == threading.__file__
    if threading.get_ident() != threading.main_thread().ident and not begins_in_python:
        # Of another thread that has called autograd and waits for it.
        waits = (frame for frame in sys._current_frames().values() if frame.f_code.co_filename == _AUTOGRAD)
        yield from _outwards(next(waits, None))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _is_standard_library(path: str) -> bool:
    # Except in a virtual environment, other packages are installed in a folder of the standard library.
    is_installed = "/site-packages/" in path or "/dist-packages/" in path
    return path.startswith(_STANDARD_LIBRARY) and not is_installed


@cache
def is_library(path: str) -> bool:
    """Whether a frame of this file only passes calls on: one of torch, of Python, or of the rooms that send."""
    return path.startswith(_LIBRARY) or _is_standard_library(path)
