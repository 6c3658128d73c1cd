"""Torch's ``fully_shard`` (FSDP2): the counterpart of ``fsdp`` with the layout dim0.

Parameters, gradients and optimizer state are sharded, each parameter by rows. A unit is gathered before its forward,
resharded, gathered again for its backward, and its gradients are reduce-scattered. Per rank for P fp32 parameters with
Adam at rest 4P/N + 4P/N + 8P/N, with every parameter's rows padded to a multiple of N; on the wire 3P(N-1)/N elements a
step, in 2 all-gathers and 1 reduce-scatter per unit.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.engines.holdings import Holding
from shardlab.engines.peers.dtensor_peer import DTensorPeer, device_mesh, is_distributed
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.units.policy import AUTO, WrapPolicy, wrapped_modules
from shardlab.vocabulary import Collective, Role


class TorchFSDP2(DTensorPeer):
    """``fully_shard`` on each unit and on the root.

    Args:
        model: see ``Engine``; no parameter may be 0-d or non-contiguous.
        optimizer_fn: see ``Engine``.
        mesh: see ``Peer``.
        observed: see ``Peer``.
        wrap: which modules are units, see ``wrapped_modules``.
        reshard_after_forward: reshard units after forward and gather them again for backward, the root too (torch's
            default keeps the root gathered); False keeps all gathered until backward.
    """

    name = "torch_fsdp2"
    sends: ClassVar[Mapping[Collective, str]] = {
        Collective.ALL_GATHER: "parameters, gather",
        Collective.REDUCE_SCATTER: "gradients, reduction",
    }

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None, *, observed: bool = True, wrap:
        WrapPolicy = AUTO, reshard_after_forward: bool = True,
    ) -> None:  # fmt: skip
        self.wrap, self.reshard_after_forward = wrap, reshard_after_forward
        self._gathered: list[Tensor] = []
        super().__init__(model, optimizer_fn, mesh, observed=observed)

    @staticmethod
    def check_params(params: Mapping[str, nn.Parameter]) -> None:
        """Refuse what torch refuses too, but only on the ranks.

        Raises:
            ValueError: a parameter is 0-d or non-contiguous.
        """
        for name, param in params.items():
            if param.dim() == 0 or not param.is_contiguous():
                what = "0-d" if param.dim() == 0 else "not contiguous"
                raise ValueError(
                    f"strategies: torch's fully_shard does not take parameter {name!r}, which is {what}; leave out "
                    "'torch_fsdp2', or change the parameter (to shape [1], to .contiguous())"
                )

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of ``loss``, averaged over the data axis unless inside ``no_sync()``."""
        self.module.set_requires_gradient_sync(self._sync)  # type: ignore[operator]
        super().backward(loss, retain_graph)

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """Inside, the module has its full parameters on every rank, as plain tensors to read; collective.

        Raises:
            ValueError: with ``keep_changes``, since torch copies nothing back.
        """
        if keep_changes:
            raise ValueError(f"keep_changes: strategy {self.name!r} copies nothing back; use load_full_state_dict()")
        with self._for("full parameters"):
            for unit in self._units:
                unit.unshard()  # type: ignore[operator]
        try:
            yield self.module
        finally:
            for unit in self._units:
                unit.reshard()  # type: ignore[operator]

    def holdings(self) -> Iterator[Holding]:
        """As in ``Engine``, and the gathered parameters: torch keeps their tensors and frees the storages."""
        yield from super().holdings()
        yield from (Holding(Role.GATHERED_PARAMETER, tensor) for tensor in self._gathered)

    def close(self) -> None:
        """Remove the hooks that this engine added; the module stays as torch has changed it."""
        for hook in self._first_forward.values():
            hook.remove()
        self._gathered = []
        super().close()

    def _prepare(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.check_params(self.params)
        over = device_mesh(self._group, self.mesh.device.type)
        # Inner units before outer ones: each fully_shard takes the parameters that are not yet in a unit.
        self._units = [*reversed(wrapped_modules(self.module, self.wrap).values()), self.module]
        for unit in self._units:
            fully_shard(unit, mesh=over, reshard_after_forward=self.reshard_after_forward)
        # Read again: distributed parameters have taken the places of the plain ones.
        # Into the same dict, for what else holds it would keep a whole plain model alive.
        self.params.update(self.module.named_parameters())
        self._first_forward = {unit: unit.register_forward_pre_hook(self._keep_gathered) for unit in self._units}

    def _keep_gathered(self, unit: nn.Module, _: Any) -> None:
        """Note a unit's gathered parameters in its first forward: after torch's hook they are plain tensors."""
        self._first_forward.pop(unit).remove()
        self._gathered += [param.detach() for param in unit.parameters() if not is_distributed(param)]
