"""Torch's ``DistributedDataParallel``: the counterpart of ``bucketed``.

Everything is replicated. Gradients are views of DDP's buckets, which are never freed, so between ``zero_grad()`` and
the next backward they count as communication buffers. Per rank for P fp32 parameters with Adam: 4P parameters, 4P
gradients, 8P state; on the wire 2P(N-1)/N elements a step. After the first backward DDP rebuilds its buckets in the
order in which gradients arrived.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.engines.holdings import Holding
from shardlab.engines.peers.base import Peer
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.vocabulary import Collective, Role


class TorchDDP(Peer):
    """``torch.nn.parallel.DistributedDataParallel`` with ``gradient_as_bucket_view=True``.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Peer``.
        observed: see ``Peer``.
        bucket_bytes: capacity of a bucket in bytes.
        find_unused_parameters: needed if a rank may leave a parameter unused; costs a walk over the graph.
    """

    name = "torch_ddp"
    sends: ClassVar[Mapping[Collective, str]] = {
        Collective.ALL_REDUCE: "gradients of bucket",
        Collective.BROADCAST: "buffers or order of buckets",
    }

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: OptimizerFn,
        mesh: BaseMesh | None = None,
        *,
        observed: bool = True,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        find_unused_parameters: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is below 1")
        self.bucket_bytes, self.find_unused_parameters = bucket_bytes, find_unused_parameters
        self._ddp: Any = None
        # Weak references: DDP frees its first buckets when it rebuilds them.
        self._buckets: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        super().__init__(model, optimizer_fn, mesh, observed=observed)

    @override
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """As in ``Engine``, once for each forward.

        Raises:
            ValueError: with ``retain_graph``: DDP expects one backward per forward, and would not reduce a second one.
        """
        if retain_graph:
            raise ValueError(
                f"retain_graph: strategy {self.name!r} reduces the gradients of a forward once, and would not average "
                "those of a second backward; call backward on the sum of the losses, or use 'bucketed'"
            )
        super().backward(loss)

    @contextlib.contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        """Inside, forward and backward only accumulate on this rank."""
        with super().no_sync(), self._ddp.no_sync():
            yield

    @override
    def holdings(self) -> Iterator[Holding]:
        """As the base, and DDP's buckets while no gradient is in them; known from the first backward on."""
        # After the gradients: a bucket that has some is their storage, and counts as theirs.
        yield from super().holdings()
        yield from (Holding(Role.COMMUNICATION_BUFFER, _bytes_of(storage)) for storage in self._buckets)

    @override
    def close(self) -> None:
        """Drop DDP, so that the module trains alone again."""
        # The last reference: DDP takes its hooks off the parameters when it is destroyed.
        self._ddp = None
        super().close()

    @override
    def _equalise(self, tensors: list[Tensor], tag: str) -> None:
        """Nothing to do: DDP broadcasts them itself."""

    @override
    def _prepare(self) -> None:
        self._ddp = DistributedDataParallel(
            self.module,
            process_group=self._group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.bucket_bytes / 1024**2,
            find_unused_parameters=self.find_unused_parameters,
        )

    @override
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._ddp(*args, **kwargs)

    @override
    def _means_are_there(self) -> None:
        for param in self.params.values():
            if param.grad is not None:
                self._buckets.add(param.grad.untyped_storage())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A tensor over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
