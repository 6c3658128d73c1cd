"""The messages of a model of which names and shapes are known: the engine trains a stand-in with the same parameters.

    predicted_collectives(described(module), Setup("fsdp", num_ranks=8, units=units_of(module)))

The stand-in uses each parameter once, unit by unit in the module's order, and computes nothing. What a module's own
forward decides (units that it calls in another order, twice or not at all) is in the plan of a workload alone.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.dry.messages import DryRun, Log
from shardlab.engines import AnyEngine, build_engine, engine_options
from shardlab.engines.precision import Precision
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.partition.slices import SLICES, even_slice
from shardlab.planner.groups import groups_of
from shardlab.planner.setup import PlannedModel, PlannedParam, Setup
from shardlab.vocabulary import MeshAxis, Phase


def predicted_collectives(
    model: PlannedModel, setup: Setup, *, ranks: Sequence[int] | None = None, run: str | None = None
) -> pd.DataFrame:
    """Table ``collectives`` with ``source='predicted'``: rank by rank in the order of issue, times NaN.

    Of a tensor-parallel model (``planner.divided``) the ranks are those of one data axis.

    Args:
        model: its parameters.
        setup: the strategy.
        ranks: those wanted; None for all.
        run: name of the run; None for the strategy's.

    Raises:
        ValueError: a rank or a parameter's name that does not exist, or an element type that torch does not have.
    """
    ranks = setup.ranks_among(ranks)
    groups_of(model, setup)  # which refuses units that are wrong
    if (kept := setup.precision) is not None and kept.gradient != kept.parameter:
        raise ValueError(
            f"precision: gradients of {kept.gradient} bytes beside parameters of {kept.parameter} are sent "
            "by nobody here; give compute_dtype and reduce_dtype"
        )
    axes = {str(axis): size for axis, size in setup.sizes.items()}
    if (tensor := model.tensor_ranks) > 1:
        axes[MeshAxis.TENSOR] = tensor
    table = DryRun(lambda mesh, log: _step(model, setup, mesh, log), axes).messages(
        [rank * tensor for rank in ranks], run or setup.strategy
    )
    return table.assign(rank=table["rank"] // tensor)


def _step(model: PlannedModel, setup: Setup, mesh: BaseMesh, log: Log) -> None:
    module, scaler = _StandIn(model, setup), GradScaler() if setup.scales_loss else None
    engine = build_engine(
        setup.strategy, module, lambda tensors: torch.optim.SGD(tensors, lr=0.0), mesh,
        broadcast_buffers=setup.broadcast_buffers, **_options(setup),
    )  # fmt: skip
    with engine:  # leaving it gathers, which is no part of the step
        _train(engine, setup, log, scaler)


def _train(engine: AnyEngine, setup: Setup, log: Log, scaler: GradScaler | None) -> None:
    with log.step():
        for left in reversed(range(setup.micro_batches)):
            with engine.no_sync() if left else contextlib.nullcontext():
                with log.phase(Phase.FORWARD):
                    loss = engine(torch.zeros((), requires_grad=True))
                with log.phase(Phase.BACKWARD):
                    engine.backward(loss if scaler is None else scaler.scale(loss))
        with log.phase(Phase.CLIP):
            if scaler is not None:
                scaler.unscale_(engine)
            if setup.clip:
                engine.clip_grad_norm_(1.0)
        with log.phase(Phase.STEP):
            engine.step()


def _options(setup: Setup) -> dict[str, Any]:
    names = setup.compute_dtype, setup.reduce_dtype
    compute, reduce = (None if name is None else getattr(torch, name) for name in names)
    known = {
        "bucket_bytes": setup.bucket_bytes, "partition": setup.partition, "sharding": setup.sharding,
        "wrap": tuple(setup.units) or "root", "prefetch": setup.prefetch, "layout": setup.layout,
        "precision": Precision(compute, reduce), "offload": setup.offload, "replicate_below": setup.replicate_below,
    }  # fmt: skip
    return {name: value for name, value in known.items() if name in engine_options(setup.strategy)}


class _StandIn(nn.Module):
    """A module with these parameters, and units of these names."""

    def __init__(self, model: PlannedModel, setup: Setup) -> None:
        super().__init__()
        # Of units each parameter is below its own, or the root, whatever it is called: of tied ones that says nothing.
        unit_of = {name: f"{unit}." for unit, names in setup.units.items() for name in names}
        by_unit = "wrap" in engine_options(setup.strategy)
        for place, param in enumerate(model.params):
            own = f"{unit_of.get(param.spec.name, '')}p{place}.weight" if by_unit else param.spec.name
            owner, _, name = own.rpartition(".")
            module = _below(self, owner)
            module.register_parameter(name, nn.Parameter(_empty(param, setup), requires_grad=param.trainable))
            if param.sliced:
                whole = (param.spec.shape[0] * model.tensor_ranks, *param.spec.shape[1:])
                slices = {**getattr(module, SLICES, {}), name: even_slice(whole, 0, 0, model.tensor_ranks)}
                setattr(module, SLICES, slices)
        for buffer in model.buffers:
            owner, _, name = buffer.spec.name.rpartition(".")
            _below(self, owner).register_buffer(name, _empty(buffer, None))

    def forward(self, x: Tensor) -> Tensor:
        """A number that depends on all parameters."""
        return _used(self, x)


class _Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _used(self, x)


def _used(module: nn.Module, x: Tensor) -> Tensor:
    for param in module._parameters.values():
        if param is not None and param.is_floating_point():
            x = x + param.sum().to(x.dtype)
    for child in module.children():
        x = child(x)
    return x


def _below(root: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, _Part())
        root = root._modules[name]  # type: ignore[assignment]
    return root


def _empty(param: PlannedParam, setup: Setup | None) -> Tensor:
    if setup is not None and setup.precision is not None:
        param = param.with_itemsize(setup.precision.parameter)
    dtype = getattr(torch, param.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: {param.dtype!r} of {param.spec.name!r} is no element type of torch")
    return torch.empty(param.spec.shape, dtype=dtype)
