"""What an engine refuses, each in one sentence that names the argument and says what to do."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.comm.communicator import Communicator
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import MeshAxis


def check_params(params: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """A model that can be trained on ``device``.

    Raises:
        ValueError: no parameters, complex ones, or some on another kind of device.
    """
    if not params:
        raise ValueError("model: it has no parameters, so there is nothing to train")
    if complex_names := [name for name, param in params.items() if param.is_complex()]:
        raise ValueError(f"model: complex parameters are not supported: {complex_names}")
    for name, param in params.items():
        if not param.is_meta and param.device.type != device.type:
            raise ValueError(f"model: {name!r} is on {param.device}, the mesh on {device}; use model.to(mesh.device)")


def check_no_meta(params: Mapping[str, nn.Parameter]) -> None:
    """Parameters that have memory.

    Raises:
        ValueError: some are on the meta device.
    """
    if meta := [name for name, param in params.items() if param.is_meta]:
        raise ValueError(
            f"model: {meta[0]!r} and {len(meta) - 1} more parameters are on the meta device; only 'fsdp' builds a "
            "model unit by unit, else build it on the device"
        )


def check_max_norm(model: nn.Module, num_ranks: int) -> None:
    """No embedding that rewrites its weight in forward: each rank would do so to the rows that it looks up.

    Raises:
        ValueError: one has ``max_norm``, and the data axis has several ranks.
    """
    for name, module in model.named_modules():
        if num_ranks > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"model: {name!r} has max_norm={module.max_norm}, which rewrites in forward the rows that a rank looks "
                "up, so ranks would differ; leave max_norm out, and scale the rows after engine.step(), equally on all "
                "ranks"
            )


def tensor_axis(mesh: BaseMesh, slices: Mapping[str, TensorSlice]) -> Communicator | None:
    """The ranks that have the slices of a tensor-parallel model; None where the model is whole.

    Each of them trains on the same rows. So the data axes do what they do with a whole model, on smaller parameters;
    only what speaks of the model as a whole crosses the tensor axis too: the norm of all gradients, full state dicts
    and checkpoints.

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


def check_optimizer(optimizer: object, given: Iterable[Tensor]) -> None:
    """An optimizer of the tensors it was given; over the module's own it would train nothing where pieces are stepped.

    Raises:
        ValueError: it is no optimizer, or steps other tensors.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer_fn: it returned a {type(optimizer).__name__}, and not an optimizer")
    known = {id(tensor) for tensor in given}
    strange = [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) not in known]
    if strange:
        raise ValueError(
            f"optimizer_fn: its optimizer steps {len(strange)} tensors that it was not given; make it from the "
            "function's argument, for example lambda tensors: AdamW(tensors, lr=1e-3)"
        )


def check_optimizer_fn(optimizer_fn: object) -> None:
    """A function that makes an optimizer.

    Raises:
        ValueError: it is something else, for example the optimizer itself.
    """
    if not callable(optimizer_fn):
        raise ValueError(
            f"optimizer_fn: a function of the tensors to step is needed, not a {type(optimizer_fn).__name__}; for "
            "example lambda tensors: AdamW(tensors, lr=1e-3)"
        )


def second_gradient(name: str) -> RuntimeError:
    """What is raised when parameter ``name`` gets a gradient in a backward that has already sent its first one.

    It is in parts only where a backward runs inside the backward, and then one part came from outside of it.
    """
    return RuntimeError(
        f"gradient of {name!r}: it comes in parts, some from within reentrant activation checkpointing and some from "
        "outside, and the first has been sent; use checkpoint(..., use_reentrant=False)"
    )


def sharded_gradient(name: str) -> str:
    """What to say to whoever uses ``.grad`` at the module's parameter ``name`` where gradients are sharded."""
    return (
        f"gradient of {name!r}: this rank has a piece of it only, as '.grad' in engine.step_tensors(). Write "
        "engine.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), "
        "and engine.zero_grad() to forget gradients"
    )
