"""What all communicators of a process share, and the ends of groups that it no longer uses.

Whoever started a rank's process says what holds for all its groups: device, timeout, observers. So the hang board
observes every mesh, also one made in a notebook cell that knows nothing of it. Other observers use ``observed_by``.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardlab.comm.events import Observer, Observers

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
