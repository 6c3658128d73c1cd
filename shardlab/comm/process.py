"""What all communicators of a process share.

Whoever started a rank's process says what holds for all its groups: device, timeout, observers. So the hang board
observes every mesh, also one made in a notebook cell that knows nothing of it. Other observers use ``observed_by``.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardlab.comm.events import Observers


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
