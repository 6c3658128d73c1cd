"""A module made tensor parallel: which of its layers the ranks of the axis ``tensor`` divide, and how."""

from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.comm.slices import cut
from shardlab.engines import AnyEngine
from shardlab.tensor_parallel import Column, Row, parallelize_module
from shardlab.tensor_parallel.plan import Plan

STYLES = {
    "enter": Column(gather_output=True),
    "inner": Column(gather_output=True),
    "up": Column(),
    "down": Row(),
    "leave": Row(input_is_parallel=False),
}
"""By the last part of a layer's name; others stay whole on every rank, and so does an embedding."""


def make_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Slice the model in place over the mesh's axis ``tensor``, if it has one; collective."""
    if mesh.axes.get("tensor", 1) > 1:
        parallelize_module(model, plan_of(model), mesh["tensor"])


def plan_of(model: nn.Module) -> Plan:
    layers = {name: name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    return {name: STYLES[kind] for name, kind in layers.items() if kind in STYLES}


def own_part(engine: AnyEngine, name: str, tensor: Tensor) -> Tensor:
    """What a rank's model has of a parameter, or of its gradient: all of it, or a slice."""
    return cut(tensor, engine.slices[name]) if name in engine.slices else tensor
