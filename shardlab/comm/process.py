"""What holds for every mesh of this process: where tensors live, how long a collective may take, who watches.

A rank's process belongs to whoever started it. That starter watches all meshes, also those made in a notebook cell that
knows nothing of it, and sets the time after which torch gives a collective up. Everything else uses ``observed_by``.
"""

import gc
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardlab.comm.events import Observer


class Process:
    """One process, one starter, for its whole life.

    Attributes:
        device: where tensors of a mesh live that names no device.
        observers: told of every collective of every communicator made from now on.
        timeout: after this torch ends a collective with an error; None for torch's default.
        retired: what ends the groups that nobody uses any more. A group that one rank destroys ends the others'
            collectives with a connection error that names nobody; so they stay until the next mesh, which all ranks
            have reached.
    """

    device: torch.device = torch.device("cpu")
    observers: tuple[Observer, ...] = ()
    retired: tuple[Callable[[], object], ...] = ()
    timeout: timedelta | None = None


def become_rank(device: torch.device, timeout: timedelta, *observers: Observer) -> None:
    """From now on meshes live on ``device``, end collectives after ``timeout`` and tell ``observers`` of them."""
    Process.device, Process.timeout, Process.observers = device, timeout, observers


def retire(*ends: Callable[[], object]) -> None:
    """What these end nobody on this rank uses any more; what stays costs: gloo's thread wakes 100 times a second."""
    Process.retired = (*Process.retired, *ends)


def leave_group() -> None:
    """Destroy the default group and the groups of closed meshes; a process calls it last.

    A group that is merely forgotten keeps gloo's threads. One that still holds a tensor when the interpreter ends needs
    it to let go, and that aborts the process ("terminate called without an active exception").
    """
    Process.retired = ()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what is left of an engine is a cycle: module, hooks, engine, mesh


def all_gather_object(value: object) -> list[object]:
    """Every rank's ``value``, in rank order, on every rank of the default group.

    The objects are pickled: on NCCL they travel through the current CUDA device, on gloo through host memory. Every
    rank has to call it. Communicates about (N - 1) times the largest pickled object per rank.

    Args:
        value: anything that pickles.

    Returns:
        ``world_size`` objects; element ``r`` is what rank ``r`` gave.
    """
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
