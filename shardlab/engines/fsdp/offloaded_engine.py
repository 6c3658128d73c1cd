"""An engine with shards in host memory: when they visit the device, and when the host waits for copies of them."""

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from typing_extensions import override

from shardlab.engines.agreement import all_or_none
from shardlab.engines.fsdp.unit import UnitBucket
from shardlab.engines.holdings import Holding
from shardlab.engines.offload import OFFLOADS, check_host_memory, wait_for_copies
from shardlab.engines.sharded_engine import ShardedEngine
from shardlab.engines.state import Stateful
from shardlab.engines.step_tensors import StepTensors
from shardlab.vocabulary import Role


class OffloadedEngine(ShardedEngine):
    """A ``ShardedEngine`` with an ``offload``, which must be set before ``Engine.__init__``."""

    offload: str
    buckets: Sequence[UnitBucket]

    @override
    def _prepare(self) -> StepTensors:
        tensors = super()._prepare()
        # The shards are still on their way to host memory, and the host may read them from here on.
        if OFFLOADS[self.offload].parameters:
            wait_for_copies(self.mesh.device)
        return tensors

    def _check_host_memory(self, num_shards: int) -> None:
        """Refuse, on all ranks, what does not fit; before anything is moved."""
        offload, num_ranks = OFFLOADS[self.offload], prod(self.mesh.axes.values())
        if offload.parameters:
            # Parameters and gradients; of the optimizer's state nobody knows the size yet.
            num_bytes = sum(param.nbytes for param in self.params.values()) * (1 + offload.gradients_and_state)
            all_or_none(self.comms, self.mesh.device, lambda: check_host_memory(num_bytes // num_shards, num_ranks))

    @override
    def _reduce_gradients(self) -> None:
        super()._reduce_gradients()
        if OFFLOADS[self.offload].gradients_and_state:
            wait_for_copies(self.mesh.device)  # once, for the means of all buckets
            for bucket in self.buckets:
                bucket.take_arrived()

    @contextlib.contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        """Inside, shards whose optimizer state is on the device are on it too."""
        offload, device = OFFLOADS[self.offload], self.mesh.device
        if offload.gradients_and_state:
            wait_for_copies(device)  # the host is about to write what a gather may still be reading
        try:
            for bucket in self.buckets:
                bucket.visit_device()
            yield
        finally:  # after an error too, or the next gather would send the host's old values
            self._return_to_host()

    @override
    def after_optimizer_step(self) -> None:
        """As the base; first returns what has been stepped to the host, which is where gathers read it."""
        self._take_assigned()
        self._return_to_host()
        super().after_optimizer_step()

    def _return_to_host(self) -> None:
        offload = OFFLOADS[self.offload]
        for bucket in self.buckets:
            bucket.return_to_host()
        if offload.parameters and not offload.gradients_and_state:
            wait_for_copies(self.mesh.device)

    @override
    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """As the base."""
        if OFFLOADS[self.offload].parameters:
            wait_for_copies(self.mesh.device)  # the host is about to write what a gather may still be reading
        return super().load(directory, **objects)

    @override
    def _state_holdings(self) -> Iterator[Holding]:
        for holding in super()._state_holdings():
            if holding.role is Role.OPTIMIZER_STATE and OFFLOADS[self.offload].gradients_and_state:
                yield Holding(Role.OFFLOADED, holding.tensor)
            yield holding
