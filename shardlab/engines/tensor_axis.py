"""A tensor-parallel model under a data strategy: the second axis, as far as an engine has to know it.

Each rank of the axis ``tensor`` has slices of some parameters and all of the others, and trains on the same rows. So
the data axes do everything they do with a whole model, on smaller parameters; only what speaks of the model as a whole
crosses the tensor axis too: the norm of all gradients, full state dicts, checkpoints.
"""

from collections.abc import Mapping

from shardlab.comm import BaseMesh, Communicator
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import MeshAxis


def tensor_axis(mesh: BaseMesh, slices: Mapping[str, TensorSlice]) -> Communicator | None:
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
