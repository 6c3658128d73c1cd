"""What a process does to become a rank and to end as one; who observes it, and groups that it no longer uses."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from shardlab.comm.events import Observer
from shardlab.comm.observed_group import Process


def become_rank(device: torch.device, timeout: timedelta, *observers: Observer) -> None:
    """Set the device, the timeout and the observers of all meshes made from now on."""
    Process.device, Process.timeout, Process.observers = device, timeout, observers


@contextlib.contextmanager
def observing_new(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` is told of the collectives of every communicator that is made, of whatever mesh."""
    before, Process.observers = Process.observers, (*Process.observers, observer)
    try:
        yield
    finally:
        Process.observers = before


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
