"""A wrapped module, the parameters that are gathered for it, and the buckets in which they travel.

Parameters of one dtype that are all trainable, or all frozen, make one ``UnitBucket``. A module that mixes them has
several, so that frozen parameters are never reduce-scattered. A bucket is that of ZeRO-3, with shards that may be
replicated and may be in host memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending
from shardlab.comm.transports.base import MismatchError
from shardlab.engines.gathered_parameters import BucketState
from shardlab.engines.held_parameters import reshard_all
from shardlab.engines.holdings import Holding
from shardlab.engines.offload import Offload, copy_to_host, in_host_memory
from shardlab.engines.placeholder import ParameterSites
from shardlab.engines.precision import Precision
from shardlab.engines.sharded_bucket import ShardedBucket
from shardlab.partition.chunks import Layout
from shardlab.vocabulary import Role


class Unit:
    """A module that the wrap policy has chosen, or the root.

    Args:
        name: of the module, or 'root'.
        module: the one whose forward and backward need the parameters.
        buckets: its own, without those of units inside it.
    """

    def __init__(self, name: str, module: nn.Module, buckets: "Sequence[UnitBucket]") -> None:
        self.name, self.module, self.buckets = name, module, tuple(buckets)
        self.params = tuple(param for bucket in self.buckets for param in bucket.params.values())

    @property
    def is_spread(self) -> bool:
        """Whether ranks hold different elements, so that gathering it communicates."""
        return any(not bucket.is_whole for bucket in self.buckets)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Its parameters that train now."""
        return [param for param in self.params if param.requires_grad]

    @property
    def is_partly_frozen(self) -> bool:
        """Whether some of its parameters do not train now."""
        return not all(param.requires_grad for param in self.params)

    def start_unshard(self) -> bool:
        """Begin to gather, and return whether anything was left to gather."""
        was_sharded = any(bucket.state is BucketState.SHARDED for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.start_unshard()
        return was_sharded

    def unshard(self) -> None:
        """Gather the full parameters."""
        # The gathers of all buckets are issued before the first is waited for.
        self.start_unshard()
        with _advising():
            for bucket in self.buckets:
                bucket.unshard()

    def reshard(self) -> None:
        """Free the full parameters, unless the user holds them."""
        reshard_all(self.buckets)

    def drop_gather(self) -> None:
        """Drop a prefetch that was not used."""
        for bucket in self.buckets:
            if bucket.state is BucketState.GATHERING:
                bucket.reshard()

    def start_reduce(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Begin to reduce the gradients; buckets where none is due are skipped, such as frozen ones."""
        for bucket in self.buckets:
            if any(is_due(param) for param in bucket.params.values()):
                bucket.start_reduce()

    @property
    def is_reducing(self) -> bool:
        """Whether gradients of it are under way."""
        return any(bucket.is_reducing for bucket in self.buckets)

    def advance_reduce(self) -> None:
        """Wait for what is being reduced, and begin the next axis if there is one."""
        with _advising():
            for bucket in self.buckets:
                bucket.advance_reduce()

    def finish_reduce(self) -> None:
        """Wait for the means."""
        with _advising():
            for bucket in self.buckets:
                bucket.finish_reduce()


@contextlib.contextmanager
def _advising() -> Iterator[None]:
    """Add to the error of two collectives that meet what to do where ranks use different units."""
    try:
        yield
    except MismatchError as error:
        error.add_note(
            "wrap: every rank must use the same units, and not, for example, an expert that its own rows choose; make "
            "one unit of the module that chooses: wrap='root', or the names of such modules, as wrap='blocks.*'"
        )
        raise


class UnitBucket(ShardedBucket):
    """Parameters of a unit that share dtype, device, requires_grad and sharding.

    Args:
        name: see ``GatheredParameters``.
        params: see ``GatheredParameters``.
        sites: see ``GatheredParameters``.
        layout: see ``GatheredParameters``.
        comm: see ``GatheredParameters``.
        precision: see ``GatheredParameters``.
        replicas: axes whose ranks hold the same chunk, in the order in which gradients are summed over them.
        offload: what stays in host memory.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        sites: Mapping[str, ParameterSites],
        layout: Layout,
        comm: Communicator,
        precision: Precision,
        *,
        replicas: Sequence[Communicator],
        offload: Offload,
    ) -> None:
        self._replicas, self._offload = tuple(replicas), offload
        self._axes_left: list[Communicator] = []  # to sum the gradients over, while they are being reduced
        self._arriving: tuple[Tensor, set[str]] | None = None  # means on their way to host memory, see ``_accept``
        self._visiting: Tensor | None = None  # an offloaded shard on the device, while the optimizer steps
        super().__init__(name, params, sites, layout, comm, precision)

    def visit_device(self) -> None:
        """Bring an offloaded shard to the device, for an optimizer that steps there."""
        if self._offload.parameters and not self._offload.gradients_and_state and self._visiting is None:
            self.take_assigned()  # or what another optimizer has put in the place of a piece would be lost
            # On the device for the step alone, beside the shard in host memory.
            self._visiting = torch.empty(self.shard.shape, dtype=self.shard.dtype, device=self.device)
            self._visiting.copy_(self.shard, non_blocking=True)
            # No wait: the optimizer's kernels come behind this copy, on the same stream.
            self._point_pieces_at(self._visiting)

    def advance_reduce(self) -> None:
        """Wait for the reduction under way; begin that over the next axis, or take the means if it was the last.

        So a unit's reduce-scatter travels during the backward of the next unit, and its all-reduce during that of the
        one after.
        """
        if self._reducing is not None and self._axes_left:
            self._sum_over_next()
        else:
            self.finish_reduce()

    def return_to_host(self) -> None:
        """Copy what has been stepped back into host memory; the host must wait before it reads it."""
        if self._visiting is not None:
            # Copied first: then nothing refers to the device's copy any more, and its memory is free.
            copy_to_host(self.shard, self._visiting)
            self._visiting = None
            self._point_pieces_at(self.shard)

    @override
    def _home(self) -> Tensor:
        return self.shard if self._visiting is None else self._visiting

    @override
    def _move_home(self, home: Tensor) -> None:
        if self._visiting is None:
            self.shard = torch.empty_like(home, pin_memory=self.shard.is_pinned()).copy_(home)
        else:
            self._visiting = home

    @override
    def parameter_holdings(self) -> Iterator[Holding]:
        """As the base; a shard in host memory is ``Role.OFFLOADED``, which comes first and so counts."""
        if self._offload.parameters:
            yield Holding(Role.OFFLOADED, self.shard)
        yield from super().parameter_holdings()
        if self._visiting is not None:
            yield Holding(Role.PARAMETER, self._visiting)

    @override
    def gradient_holdings(self) -> Iterator[Holding]:
        """As the base; means in host memory are ``Role.OFFLOADED``."""
        if self._offload.gradients_and_state and self.gradient_shard is not None:
            yield Holding(Role.OFFLOADED, self.gradient_shard)
        if self._arriving is not None:
            yield Holding(Role.OFFLOADED, self._arriving[0])
        yield from super().gradient_holdings()

    @override
    def _chunk_to_gather(self) -> Tensor:
        # On the device before it is cast: the host would cast into memory that is not pinned, and wait for the copy.
        return self._home().to(self.device, non_blocking=True)

    @override
    def _keep_shard(self, shard: Tensor) -> Tensor:
        return in_host_memory(shard) if self._offload.parameters else shard

    @override
    def _needs_no_gather(self, dtype: torch.dtype) -> bool:
        return super()._needs_no_gather(dtype) and not self._offload.parameters

    @override
    def _reduce(self, buffer: Tensor) -> tuple[Tensor, Pending]:
        self._axes_left = list(self._replicas)
        # Nothing to scatter: the first sum over replicas is issued here, to overlap with backward.
        if self.is_whole and self._axes_left:
            return buffer, self._next_sum(buffer)
        return super()._reduce(buffer)

    @override
    def _sum_over_replicas(self) -> None:
        while self._axes_left:
            self._sum_over_next()

    @property
    @override
    def _num_summed(self) -> int:
        return super()._num_summed * prod(replicas.num_ranks for replicas in self._replicas)

    def _sum_over_next(self) -> None:
        """When the sums over one axis are there, begin to sum these over the next, in the same order on all ranks."""
        assert self._reducing is not None
        _, sums, pending = self._reducing
        pending.wait()
        # The buffer that was reduce-scattered is no longer needed.
        self._reducing = (sums, sums, self._next_sum(sums))

    def _next_sum(self, sums: Tensor) -> Pending:
        return self._axes_left.pop(0).all_reduce(sums, tag=f"gradients of {self.name}")

    @override
    def _accept(self, means: Tensor, unused: set[str]) -> None:
        if self._offload.gradients_and_state:
            assert self._arriving is None
            # The means may be freed at once: their memory goes to later work of this stream, behind the copy.
            self._arriving = in_host_memory(means), unused
        else:
            super()._accept(means, unused)

    def take_arrived(self) -> None:
        """Take the means that have arrived in host memory, after the host has waited for them."""
        if self._arriving is not None:
            means, unused = self._arriving
            self._arriving = None
            super()._accept(means, unused)

    @override
    def drop_gradients(self) -> None:
        """As the base; those on their way too."""
        self._arriving = None
        super().drop_gradients()

    @override
    def _set_gradient(self, piece: Tensor, gradient: Tensor) -> None:
        # Torch refuses a gradient on another device than the piece's data, which is in host memory outside a step.
        home, piece.data = piece.data, gradient
        piece.grad = gradient
        piece.data = home
