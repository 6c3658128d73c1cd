"""Torch's ``ZeroRedundancyOptimizer`` behind DDP: the counterpart of ``zero1``.

What differs from ``torch_ddp``: each parameter has one owner, which alone keeps its optimizer state and steps it;
after the step every parameter is broadcast from its owner. Gradients are still all-reduced, so a third of what is sent
is not needed: per rank 2P(N-1)/N elements for gradients and P(N-1)/N for parameters, in one message per parameter.
Per rank for P fp32 parameters with Adam: 4P parameters, 4P gradients, about 8P/N state.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.engines.holdings import Holding, of_state
from shardlab.engines.peers.base import STATE_IS_TORCHS
from shardlab.engines.peers.torch_ddp import TorchDDP
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.vocabulary import Collective


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
        self,
        model: nn.Module,
        optimizer_fn: OptimizerFn,
        mesh: BaseMesh | None = None,
        *,
        observed: bool = True,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        find_unused_parameters: bool = False,
        parameters_as_bucket_view: bool = False,
    ) -> None:
        self.parameters_as_bucket_view = parameters_as_bucket_view
        super().__init__(
            model, lambda tensors: self._zero(optimizer_fn(tensors)), mesh, observed=observed,
            bucket_bytes=bucket_bytes, find_unused_parameters=find_unused_parameters,
        )  # fmt: skip

    @override
    def owners(self) -> dict[str, tuple[int, ...]]:
        """The rank that steps each parameter, in the module's order."""
        # Private: there is no public way to ask for the other ranks' parts.
        parts = self.optimizer._partition_parameters()  # type: ignore[attr-defined]
        owner = {param: rank for rank, groups in enumerate(parts) for group in groups for param in group["params"]}
        return {name: (owner[param],) for name, param in self.params.items()}

    @override
    def owned(self) -> dict[str, tuple[int, int]]:
        """The parameters that this rank steps, each whole."""
        mine = [name for name, (rank,) in self.owners().items() if rank == self.comm.rank]
        return {name: (0, self.params[name].numel()) for name in mine}

    @override
    def _state_holdings(self) -> Iterator[Holding]:
        """The state of the optimizer inside torch's."""
        for name, param in self.params.items():
            for key, value in self._state().get(param, {}).items():
                if isinstance(value, Tensor):
                    yield of_state(key, value, name, (0, param.numel()))

    def _zero(self, plain: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer, built by torch over each owner's parameters."""
        with warnings.catch_warnings():
            # Torch's own module uses torch.jit.script, which warns in torch 2.13 when the module is imported.
            warnings.simplefilter("ignore", DeprecationWarning)
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

    def _state(self) -> dict[Any, dict[str, Any]]:
        state: dict[Any, dict[str, Any]] = self.optimizer.optim.state  # type: ignore[attr-defined]
        return state
