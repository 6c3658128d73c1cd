"""Torch's tensor parallelism: ``parallelize_module`` with column and row styles on DTensor; for our GPT by default.

The weights of the named linear layers are sharded over the axis ``tensor``, column-wise by output features, row-wise by
input features. Everything else is replicated, and the batch is the same on all ranks. Per block of the GPT, each over
B x S x H elements: 2 all-reduces in forward, after the row-wise layers, and 4 in backward (the inputs of q, k, v and
fc1, each reduced separately). Source of the method: Shoeybi et al., arXiv 1909.08053.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh, broadcast_coalesced
from shardlab.engines.guards.model_checks import check_types
from shardlab.engines.peers.dtensor_peer import DTensorPeer, device_mesh
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.vocabulary import Collective, MeshAxis, class_of

STYLES = ("column", "row")
GPT_PLAN: Mapping[str, str] = MappingProxyType(
    {
        "blocks.*.attention.q_proj": "column",
        "blocks.*.attention.k_proj": "column",
        "blocks.*.attention.v_proj": "column",
        "blocks.*.attention.out_proj": "row",
        "blocks.*.mlp.fc1": "column",
        "blocks.*.mlp.fc2": "row",
    }
)


class TorchTP(DTensorPeer):
    """``parallelize_module`` over the axis ``tensor``.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: with axes ``data``, of size 1, and ``tensor``.
        observed: see ``Peer``.
        plan: 'column' or 'row' by the name of a linear layer; ``*`` matches any one part of the name.

    Raises:
        ValueError: a data axis of more than 1, a plan that matches nothing, or sizes that do not divide by the ranks.
    """

    name = "torch_tp"
    axis = MeshAxis.TENSOR
    sends: ClassVar[Mapping[Collective, str]] = {Collective.ALL_REDUCE: "activations or their gradients"}

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None, *, observed: bool = True, plan:
        Mapping[str, str] = GPT_PLAN,
    ) -> None:  # fmt: skip
        check_types(model, mesh, optimizer_fn)
        if mesh is not None and mesh.axes.get(MeshAxis.DATA) != 1:
            raise ValueError(
                f"mesh: it has {mesh.axes}; 'torch_tp' needs an axis 'tensor' to cut the model over, and an axis "
                "'data' of size 1"
            )
        self.plan = dict(plan)
        super().__init__(model, optimizer_fn, mesh, observed=observed)

    def full_params(self, *, keep_changes: bool = False) -> NoReturn:
        """Always refused: the module keeps distributed tensors."""
        raise NotImplementedError(
            f"full_params: strategy {self.name!r} keeps distributed tensors in the module; use full_state_dict()"
        )

    def _equalise(self, tensors: list[Tensor], tag: str = "parameters and buffers from rank 0") -> None:
        broadcast_coalesced(self.mesh[MeshAxis.TENSOR], tensors, tag=tag)

    def _prepare(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self._check_plan()
        styles = {"column": ColwiseParallel, "row": RowwiseParallel}
        over = device_mesh(self._group, self.mesh.device.type)
        plan: dict[str, Any] = {name: styles[style]() for name, style in self.plan.items()}
        # The ranks' weights are already equal, so each cuts out its piece and nothing is sent.
        parallelize_module(self.module, over, plan, src_data_rank=None)
        # Read again: where layers are cut, distributed parameters have taken the place of the plain ones.
        # Into the same dict, for what else holds it would keep a whole plain model alive.
        self.params.update(self.module.named_parameters())

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        optimizer = super()._make_optimizer(optimizer_fn)
        # Kernels that step many tensors at once refuse distributed and plain ones together.
        for group in optimizer.param_groups:
            if self.mesh.device.type == "cuda" and "foreach" in group:
                group["foreach"] = False
        return optimizer

    def _check_plan(self) -> None:
        num_ranks = self.mesh[MeshAxis.TENSOR].num_ranks
        for pattern, style in self.plan.items():
            if style not in STYLES:
                raise ValueError(f"plan: {style!r} of {pattern!r} is not one of {', '.join(STYLES)}")
            layers = {name: layer for name, layer in self.module.named_modules() if fnmatchcase(name, pattern)}
            if not layers:
                raise ValueError(f"plan: {pattern!r} matches no module of this {type(self.module).__name__}")
            for name, layer in layers.items():
                if not isinstance(layer, nn.Linear):
                    raise ValueError(f"plan: {name!r} is {class_of(layer)}; only linear layers are cut")
                size = layer.out_features if style == "column" else layer.in_features
                if size % num_ranks:
                    raise ValueError(f"plan: {size} features of {name!r} do not divide among {num_ranks} ranks")
