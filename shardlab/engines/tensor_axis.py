"""A tensor-parallel model under a data strategy: the second axis, as far as an engine has to know it.

Each rank of the axis ``tensor`` has slices of some parameters and all of the others, and trains on the same rows. So
the data axes do everything they do with a whole model, on smaller parameters; only what speaks of the model as a whole
crosses the tensor axis too: the norm of all gradients, full state dicts, checkpoints.
"""

from collections.abc import Mapping

import torch

from shardlab.comm import Communicator, Mesh
from shardlab.engines.shards import WHOLE_MODEL_OPTIMIZERS, WHOLE_TENSOR_OPTIMIZERS
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import MeshAxis


def tensor_axis(mesh: Mesh, slices: Mapping[str, TensorSlice]) -> Communicator | None:
    """The ranks of all slices; None where the model is whole.

    Raises:
        ValueError: the model is sliced over other ranks than those of the mesh's tensor axis, or not at all.
    """
    num_ranks = mesh.axes.get(MeshAxis.TENSOR, 1)
    if not slices and num_ranks > 1:
        raise ValueError(
            f"model: the mesh has {num_ranks} tensor-parallel ranks, and the model is whole; call "
            "parallelize_module(model, plan, mesh['tensor']) before the engine is built"
        )
    if not slices:
        return None
    needed = next(iter(slices.values())).num_ranks
    if needed != num_ranks or MeshAxis.TENSOR not in mesh.axes:
        raise ValueError(
            f"mesh: the model is sliced over {needed} ranks of an axis 'tensor', and the mesh has {mesh.axes}; give "
            "parallelize_module the axis of this mesh"
        )
    return mesh[MeshAxis.TENSOR]


def check_sliced(optimizer: torch.optim.Optimizer, slices: Mapping[str, TensorSlice]) -> None:
    """Refuse an optimizer that looks at whole tensors, where some are slices.

    Raises:
        ValueError: it does; its step would not be that of the whole model.
    """
    kind = type(optimizer).__name__
    sliced = any(found.num_ranks > 1 for found in slices.values())
    if sliced and kind in WHOLE_TENSOR_OPTIMIZERS | WHOLE_MODEL_OPTIMIZERS:
        raise ValueError(
            f"optimizer: {kind} looks at more than one element at a time, and the model's parameters are slices over "
            "the tensor axis; use an optimizer that steps element by element, such as AdamW"
        )
