"""CPU offload: shards stay in host memory and are on the device only while they are needed.

===========  ==============================  ==========================================================
offload      in host memory between steps    crosses the bus in a step, for P parameters on N ranks
===========  ==============================  ==========================================================
none         nothing                         nothing
parameters   parameters                      every gather's chunk up; for the step P/N up and P/N down
all          parameters, gradients, state    every gather's chunk up, the gradients' P/N down
===========  ==============================  ==========================================================

``FSDP.visiting`` and ``FSDP.make_means`` say when they move for a step, ``on_device`` is each gather's copy. With
``all`` the optimizer steps on the CPU. On CUDA the host's copies are pinned, and the host goes on while they are made:
it waits once, for all of them, before it reads or writes any. On CPU ranks host and device are the same memory; the
same copies are made and the same tensors freed, so that records show what a device would hold. Source: Rajbhandari et
al., ZeRO-Infinity, arXiv 2104.07857, section 5.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardlab.engines.holdings import Holding
from shardlab.engines.sharded_params import Shards
from shardlab.vocabulary import Role


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in host memory, pinned where it comes from a CUDA device; see ``copy_to_host``."""
    return copy_to_host(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda), tensor)


def copy_to_host(host: Tensor, tensor: Tensor) -> Tensor:
    """Copy behind the work of the current stream: ``host`` may be read or written after ``wait_for_copies``."""
    return host.copy_(tensor, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Let the host wait for all copies that the current stream of ``device`` has been given."""
    if device.type == "cuda":
        # Blocking, so that the host's thread sleeps: the ranks of a host share its cores.
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


class OffloadedShards(Shards):
    """Shards in host memory; other arguments as ``Shards``.

    Args:
        with_state: whether gradients and the optimizer's state are there too.

    Attributes:
        visits: whether the pieces are on the device during a step alone.
    """

    def __init__(self, with_state: bool, *args: Any, **named: Any) -> None:
        self.visits = not with_state
        self._arriving: Tensor | None = None  # means on their way to host memory
        super().__init__(*args, **named)

    def _stored(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        host = in_host_memory(shard)
        return host, host

    def on_device(self, chunk: Tensor) -> Tensor:
        """Copied before it is rounded: the host would round into memory that is not pinned, and wait."""
        return self.stepped.to(self.device, non_blocking=True)

    def accept(self, means: Tensor) -> None:
        """As ``Shards.accept``; where gradients stay in host memory they are first sent there, see ``arrive``."""
        if not self.visits:
            self._arriving = in_host_memory(means)
            return
        # Torch refuses a gradient on another device than the piece's data, which is in host memory outside a step.
        homes = {name: piece.data for name, piece in self.pieces.items()}
        self.point_pieces_at(means)
        super().accept(means)
        for name, piece in self.pieces.items():
            piece.data = homes[name]

    def arrive(self) -> None:
        """Take the means that the host has waited for, as the pieces' ``.grad``."""
        if self._arriving is not None:
            super().accept(self._arriving)
            self._arriving = None

    def drop(self) -> None:
        """The gradients are cleared: forget those on their way to host memory too."""
        super().drop()
        self._arriving = None

    # A step of what stays in host memory and is stepped on the device.

    def visit(self) -> None:
        """Copy the shard to the device, for a step."""
        self.stepped = torch.empty(self.at_rest.shape, dtype=self.at_rest.dtype, device=self.device)
        self.stepped.copy_(self.at_rest, non_blocking=True)
        self.point_pieces_at(self.stepped)

    def leave(self) -> None:
        """Copy what has been stepped back; the host must wait before it reads it."""
        copy_to_host(self.at_rest, self.stepped)
        visiting, self.stepped = self.stepped, self.at_rest
        self.point_pieces_at(self.at_rest, visiting)

    def holdings(self) -> Iterator[Holding]:
        """As ``Shards``, under a role of its own first: a storage counts in the first role that is said of it."""
        yield Holding(Role.OFFLOADED, self.at_rest)
        if not self.visits:
            yield from (Holding(Role.OFFLOADED, one) for one in (self.means, self._arriving) if one is not None)
        yield from super().holdings()
