"""What holds for every communicator of this process: who watches it, and how long a collective may take.

A rank's process belongs to whoever started it. That starter watches all meshes, also those made in a notebook cell that
knows nothing of it, and sets the time after which torch gives a collective up. Everything else uses ``observed_by``.
"""

from datetime import timedelta

import torch.distributed as dist

from shardlab.comm.events import Observer


class Process:
    """One process, one starter, for its whole life.

    Attributes:
        observers: told of every collective of every communicator made from now on.
        timeout: after this torch ends a collective with an error; None for torch's default.
        retired: groups of closed meshes. A group that one rank destroys ends the others' collectives with a connection
            error that names nobody; so they stay until the next mesh, which all ranks have reached.
    """

    observers: tuple[Observer, ...] = ()
    retired: tuple[dist.ProcessGroup, ...] = ()
    timeout: timedelta | None = None


def watch_process(observer: Observer, timeout: timedelta) -> None:
    """From now on every new communicator tells ``observer`` of its collectives and ends them after ``timeout``."""
    Process.observers = (*Process.observers, observer)
    Process.timeout = timeout
