"""Torch's ``DistributedDataParallel``, counterpart of ``bucketed``, and ``ZeroRedundancyOptimizer``, that of ``zero1``.

DDP: everything is replicated. Gradients are views of DDP's buckets, which are never freed, so between ``zero_grad()``
and the next backward they count as communication buffers. Per rank for P fp32 parameters with Adam: 4P parameters, 4P
gradients, 8P state; on the wire 2P(N-1)/N elements a step. After the first backward DDP rebuilds its buckets in the
order in which gradients arrived.

ZeRO-1: what differs is that each parameter has one owner, which alone keeps its optimizer state and steps it; after the
step every parameter is broadcast from its owner. Gradients are still all-reduced, so a third of what is sent is not
needed: per rank 2P(N-1)/N elements for gradients and P(N-1)/N for parameters, in one message per parameter. Per rank
for P fp32 parameters with Adam: 4P parameters, 4P gradients, about 8P/N state.
"""

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardlab.comm import BaseMesh
from shardlab.engines.holdings import Holding
from shardlab.engines.peers.base import STATE_IS_TORCHS, Peer
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
    broadcasts_buffers = True  # before each forward that comes after one whose gradients were to be sent
    sends: ClassVar[Mapping[Collective, str]] = {
        Collective.ALL_REDUCE: "gradients of bucket",
        Collective.BROADCAST: "buffers or order of buckets",
    }

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None, *, observed: bool = True,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES, find_unused_parameters: bool = False,
    ) -> None:  # fmt: skip
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is below 1")
        self.bucket_bytes, self.find_unused_parameters = bucket_bytes, find_unused_parameters
        self._ddp: Any = None
        # Weak references: DDP frees its first buckets when it rebuilds them.
        self._buckets: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        super().__init__(model, optimizer_fn, mesh, observed=observed)

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
    def no_sync(self) -> Iterator[None]:
        """Inside, forward and backward only accumulate on this rank."""
        with super().no_sync(), self._ddp.no_sync():
            yield

    def holdings(self) -> Iterator[Holding]:
        """As the base, and DDP's buckets while no gradient is in them; known from the first backward on."""
        # After the gradients: a bucket that has some is their storage, and counts as theirs.
        yield from super().holdings()
        yield from (Holding(Role.COMMUNICATION_BUFFER, _bytes_of(storage)) for storage in self._buckets)

    def close(self) -> None:
        """Drop DDP, so that the module trains alone again."""
        # The last reference: DDP takes its hooks off the parameters when it is destroyed.
        self._ddp = None
        super().close()

    def _equalise(self, tensors: list[Tensor], tag: str = "parameters and buffers from rank 0") -> None:
        """Nothing to do: DDP broadcasts them itself."""

    def _prepare(self) -> None:
        self._ddp = DistributedDataParallel(
            self.module,
            process_group=self._group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.bucket_bytes / 1024**2,
            find_unused_parameters=self.find_unused_parameters,
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._ddp(*args, **kwargs)

    def _means_are_there(self) -> None:
        for param in self.params.values():
            if param.grad is not None:
                self._buckets.add(param.grad.untyped_storage())


class TorchZeRO1(TorchDDP):
    """``DistributedDataParallel`` with ``ZeroRedundancyOptimizer``.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``; torch builds the same class of optimizer over the parameters of each owner.
        mesh: see ``Peer``.
        observed: see ``Peer``.
        bucket_bytes: see ``TorchDDP``.
        find_unused_parameters: see ``TorchDDP``.
        parameters_as_bucket_view: keep an owner's parameters in one buffer, so that each owner broadcasts once.
    """

    name = "torch_zero1"
    no_checkpoints = STATE_IS_TORCHS
    sends: ClassVar[Mapping[Collective, str]] = {**TorchDDP.sends, Collective.BROADCAST: "parameters"}

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None, *, observed: bool = True,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES, find_unused_parameters: bool = False, parameters_as_bucket_view: bool
        = False,
    ) -> None:  # fmt: skip
        self.parameters_as_bucket_view = parameters_as_bucket_view
        super().__init__(
            model, lambda tensors: self._zero(optimizer_fn(tensors)), mesh, observed=observed,
            bucket_bytes=bucket_bytes, find_unused_parameters=find_unused_parameters,
        )  # fmt: skip

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The rank that steps each parameter, in the module's order."""
        # Private: there is no public way to ask for the other ranks' parts.
        parts = self.optimizer._partition_parameters()  # type: ignore[attr-defined]
        owner = {param: rank for rank, groups in enumerate(parts) for group in groups for param in group["params"]}
        return {name: (owner[param],) for name, param in self.params.items()}

    def owned(self) -> dict[str, tuple[int, int]]:
        """The parameters that this rank steps, each whole."""
        mine = [name for name, (rank,) in self.owners().items() if rank == self.comm.rank]
        return {name: (0, self.params[name].numel()) for name in mine}

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """The state of the optimizer inside torch's."""
        return self.optimizer.optim.state.get(param, {})  # type: ignore[attr-defined, no-any-return]

    def _zero(self, plain: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer, built by torch over each owner's parameters."""
        with warnings.catch_warnings():
            # Torch's own module uses torch.jit.script, which warns from torch 2.13 on when the module is imported.
            warnings.filterwarnings("ignore", message=".*torch.jit")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        kind = type(plain)
        known = inspect.signature(kind).parameters  # AdamW's defaults have an entry that AdamW does not take
        groups = [
            {key: value for key, value in group.items() if key == "params" or key in known}
            for group in plain.param_groups
        ]
        defaults = {key: value for key, value in plain.defaults.items() if key in known}
        # The plain optimizer ends here: it has told its class, groups and options, and never steps.
        return ZeroRedundancyOptimizer(
            groups,
            kind,
            process_group=self._group,
            parameters_as_bucket_view=self.parameters_as_bucket_view,
            **defaults,
        )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A tensor over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
