"""Which models and optimizers no engine can train, with errors that name the argument and say what to do instead."""

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.communicator import Communicator
from shardlab.comm.transports.base import MismatchError
from shardlab.engines.precision import Precision
from shardlab.engines.strategy import Strategy
from shardlab.partition.slices import SLICES, TensorSlice
from shardlab.vocabulary import MeshAxis, class_of

_DTYPE_ERROR = re.compile("dtype|scalar type")
_NO_ROWS = (MeshAxis.CONTEXT, MeshAxis.TENSOR, MeshAxis.PIPE)
"""Axes whose ranks train on the same rows, or on parts of them."""


def check_types(model: object, mesh: object, optimizer_fn: object) -> None:
    """Refuse a model that is no module, a mesh that is no mesh, and an optimizer instead of a function that builds it.

    Raises:
        ValueError: the message names the argument.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {model!r:.60} was given; give an nn.Module")
    if not isinstance(mesh, BaseMesh | None):
        raise ValueError(f'mesh: {mesh!r:.60} was given; give a Mesh, as Mesh({{"data": 2}}), or None for one process')
    if not callable(optimizer_fn):
        raise ValueError(
            f"optimizer_fn: a function of the tensors to step is needed, not {class_of(optimizer_fn)}; for example "
            "lambda tensors: AdamW(tensors, lr=1e-3)"
        )


def check_rows(mesh: BaseMesh, axes: Sequence[str], name: str) -> None:
    """Check that gradients are averaged over all axes of the mesh whose ranks train on other rows.

    Raises:
        ValueError: they are not.
    """
    if left := [axis for axis, size in mesh.axes.items() if size > 1 and axis not in (*axes, *_NO_ROWS)]:
        raise ValueError(
            f"mesh: its ranks have other rows along axis {str(left[0])!r} too, and {name} averages over "
            f"{' and '.join(axes)} alone; name all axes with rows in the strategy's axes, outer first, or leave "
            f"{str(left[0])!r} out; ranks with other stages of a model are an axis 'pipe'"
        )


def check_model(
    model: nn.Module, device: torch.device, num_ranks: int, *, may_be_meta: bool, moves_params: bool
) -> None:
    """Check that a strategy can train a model.

    Args:
        model: the user's.
        device: of the mesh.
        num_ranks: on the data axes.
        may_be_meta: whether the strategy allocates parameters that are on the meta device.
        moves_params: whether it gives parameters other memory.

    Raises:
        ValueError: it cannot; the message names what is in the way.
    """
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    _check_params(params, device)
    _check_max_norm(model, num_ranks)
    _check_meta(params, buffers, may_be_meta=may_be_meta)
    for name, one in buffers.items():
        if num_ranks > 1 and one.layout is torch.strided and one.numel() > 1 and 0 in one.stride():
            raise ValueError(f"model: elements of buffer {name!r} share their memory, as in expand(); clone() it")
    if moves_params:
        check_separate(params, {**buffers, **_attributes(model)})


def _attributes(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of modules, by name; in lists and other objects they are not looked for."""
    params = set(model.parameters())
    return {
        f"{prefix}.{key}".lstrip("."): value
        # (What a module makes anew before each forward, as torch's old spectral_norm does, is never stale.)
        for prefix, module in model.named_modules() if not module._forward_pre_hooks
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value not in params and not value.is_nested
    }  # fmt: skip


def _check_params(params: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Check that a model can be trained on ``device``.

    Raises:
        ValueError: it has no parameters, complex ones, or some on another kind of device.
    """
    if not params:
        raise ValueError("model: it has no parameters; give a module that has some to train")
    check_real(params)
    for name, param in params.items():
        if is_lazy(param):
            raise ValueError(f"model: {name!r} has no shape yet; run one forward of the model, then build the engine")
        if not param.is_meta and param.device.type != device.type:
            raise ValueError(f"model: {name!r} is on {param.device}, the mesh on {device}; use model.to(mesh.device)")


def check_real(params: Mapping[str, nn.Parameter]) -> None:
    """Check that parameters are real numbers.

    Raises:
        ValueError: some are complex.
    """
    if complex_names := [name for name, param in params.items() if param.is_complex()]:
        advice = "make each a real one with a last dim of 2, of which forward takes torch.view_as_complex"
        raise ValueError(f"model: parameters {complex_names} are complex; only real ones are supported: {advice}")


def _check_max_norm(model: nn.Module, num_ranks: int) -> None:
    """Check that no embedding rescales its weight in forward, where each rank would rescale only the rows it looks up.

    Raises:
        ValueError: one has ``max_norm``, and the data axis has several ranks.
    """
    for name, module in model.named_modules():
        if num_ranks > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"model: {name!r} has max_norm={module.max_norm}, so forward would rescale the rows that each rank "
                "looks up, and the ranks' weights would differ; leave max_norm out, and rescale the rows after "
                "engine.step(), in the same way on all ranks"
            )


def _check_meta(params: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], *, may_be_meta: bool) -> None:
    """Check that nothing is on the meta device that the engine would have to allocate, and cannot.

    Raises:
        ValueError: parameters are on the meta device, or with those that may be there buffers are, too.
    """
    meta = [name for name, param in params.items() if param.is_meta]
    if meta and not may_be_meta:
        raise ValueError(
            f"model: {meta[0]!r} and {len(meta) - 1} more parameters are on the meta device; build the model on the "
            "mesh's device, or use 'fsdp', which initializes it unit by unit"
        )
    # Of a model that was made on a device, a buffer without memory is one that its forward does not use.
    if meta and (names := [name for name, buffer in buffers.items() if buffer.is_meta]):
        raise ValueError(f"model: buffer {names[0]!r} is on the meta device; create buffers on the mesh's device")


def check_batch_norms(module: nn.Module, precision: Precision) -> None:
    """Check that weights and statistics of each batch norm have one dtype: torch computes with no others.

    Raises:
        ValueError: they would not.
    """
    for name, norm in module.named_modules():
        if not isinstance(norm, _BatchNorm) or getattr(norm, "weight", None) is None or norm.running_mean is None:
            continue
        weights, statistics = precision.compute_dtype_of(norm.weight), precision.buffers or norm.running_mean.dtype
        if weights != statistics:
            raise ValueError(
                f"precision: {type(norm).__name__} {name!r} keeps statistics in {statistics}, and torch does not "
                f"compute with these and weights in {weights}; leave precision out and write 'with torch.autocast("
                f"device, {weights}):' around engine(x), which leaves the norm's weights and statistics alone; or use "
                f"GroupNorm; or write Precision({weights}, ..., buffers={weights}), which rounds the statistics too"
            )


def check_tensor_axis(mesh: BaseMesh, model: nn.Module, slices: Mapping[str, TensorSlice]) -> None:
    """Check that a model is sliced over the ranks of the mesh's tensor axis, or whole where the mesh has none.

    Raises:
        ValueError: it is not.
    """
    num_ranks = mesh.axes.get(MeshAxis.TENSOR, 1)
    if not slices and num_ranks > 1:
        raise ValueError(
            f"model: the mesh has {num_ranks} tensor-parallel ranks, and the model is whole; call "
            "parallelize_module(model, plan, mesh['tensor']) before you build the engine"
        )
    if not slices:
        return
    needed = next(iter(slices.values())).num_ranks
    if needed != num_ranks or MeshAxis.TENSOR not in mesh.axes:
        raise ValueError(
            f"mesh: the model is sliced over {needed} ranks of an axis 'tensor', and the mesh has {mesh.axes}; pass "
            "the axis of this mesh to parallelize_module"
        )
    axis = mesh[MeshAxis.TENSOR]
    # Of a square mesh both axes have as many ranks, and only the ranks themselves tell them apart. Slices without a
    # communicator, in a module made by hand, do not say whose they are.
    comms = (getattr(module, "comm", None) for module in model.modules() if hasattr(module, SLICES))
    if other := next((comm for comm in comms if isinstance(comm, Communicator) and comm.ranks != axis.ranks), None):
        raise ValueError(
            f"mesh: the model is sliced over {needed} ranks of an axis {str(other.axis)!r}, {list(other.ranks)}, and "
            f"the axis 'tensor' of the mesh has {list(axis.ranks)}; pass that axis to parallelize_module"
        )


def check_optimizer(optimizer: object, given: Iterable[Tensor]) -> None:
    """Check that an optimizer is one that an engine can call, and ``check_stepped``.

    Raises:
        ValueError: it is not an optimizer, needs a closure, or steps other tensors.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer_fn: it returned {class_of(optimizer)}; return a torch.optim.Optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__}.step() needs a closure, which it may call several times, and "
            "engine.step() takes none; use an optimizer that steps once for each backward, such as AdamW"
        )
    check_stepped(optimizer, {id(tensor) for tensor in given})


def tensors_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of what an optimizer steps."""
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def check_stepped(optimizer: torch.optim.Optimizer, given: Collection[int]) -> None:
    """Check that an optimizer steps the tensors it was given; where pieces are stepped, those are not the module's.

    Args:
        optimizer: in whose groups they are.
        given: their ids.

    Raises:
        ValueError: it steps others.
    """
    if strange := tensors_of(optimizer).difference(given):
        raise ValueError(
            f"optimizer_fn: its optimizer steps {len(strange)} tensors that it was not given; build it from the "
            "function's argument, for example lambda tensors: AdamW(tensors, lr=1e-3), and add groups of "
            "engine.step_tensors() only; a parameter that is new in the module needs another engine"
        )


def check_separate(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Check that no parameter shares memory: a strategy that moves parameters would silently separate what does.

    Args:
        params: by name; tied ones are one parameter. Those on the meta device, and those with gaps between their
            elements, such as columns of a larger tensor, are left out.
        buffers: and other tensors, likewise; these may share memory with each other.

    Raises:
        ValueError: a parameter overlaps another one, or one of these.
    """
    is_dense = torch.ops.aten.is_non_overlapping_and_dense
    dense = [
        (tensor.data_ptr(), tensor.nbytes, name)
        for name, tensor in (*params.items(), *buffers.items())
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.nbytes and is_dense(tensor)
    ]
    ends = {True: (0, ""), False: (0, "")}  # the last one so far, of parameters and of buffers
    for start, num_bytes, name in sorted(dense):
        is_param = name in params
        end, other = max(ends.values()) if is_param else ends[True]
        if start < end:
            raise ValueError(
                f"model: {other!r} and {name!r} are two tensors over the same memory; tie them as one parameter, "
                "b.weight = a.weight, give each its own with clone(), or make a view of a parameter in forward"
            )
        ends[is_param] = max(ends[is_param], (start + num_bytes, name))


def check_sparse(module: nn.Module) -> None:
    """Check that no embedding has sparse gradients, which are in no bucket and which no strategy of ours averages.

    Raises:
        ValueError: one has, or a buffer is sparse, which no message takes.
    """
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"model: buffer {name!r} is sparse, and only dense ones are sent to all ranks; register its indices "
                "and its values as buffers, and make it of them in forward"
            )
    for name, one in module.named_modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and one.weight.requires_grad:
            raise ValueError(
                f"model: {name!r} has sparse gradients, which no strategy of ours averages; build it with sparse=False"
            )


def advise(error: BaseException, strategy: Strategy, module: nn.Module) -> None:
    """Add to an error of a forward what may have caused it, and what to do about it.

    Raises:
        RuntimeError: ``torch.func`` was used where parameters are sharded.
    """
    if strategy.by_unit and isinstance(error, MismatchError):
        error.add_note(
            "fsdp: all ranks must call the same units in the same order; make one unit of the module that chooses: "
            "wrap='root', or a wrap that names it"
        )
    if strategy.units and "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "torch.func: its grad, vjp, jacrev and hessian do not run inside a forward whose parameters are sharded, "
            "since what they save cannot be resharded; write torch.autograd.grad(..., create_graph=True), or use "
            "strategy 'zero2', whose parameters are whole, or call them under torch.no_grad() inside 'with "
            "engine.full_params():'"
        ) from error
    if isinstance(error, RuntimeError) and _DTYPE_ERROR.search(str(error)):
        _advise_on_dtypes(error, strategy.precision, module)


def _advise_on_dtypes(error: RuntimeError, precision: Precision, module: nn.Module) -> None:
    """A float32 buffer added to a 16-bit activation gives a float32 one, which no 16-bit layer takes."""
    if precision.compute is None:
        return
    others = [
        f"{name!r} ({buffer.dtype})"
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != precision.compute
    ]
    if others:
        error.add_note(
            f"precision: parameters and inputs are {precision.compute}, but not these buffers: "
            f"{', '.join(others)}. Precision(compute={precision.compute}, ..., buffers={precision.compute}) casts them "
            "too; or cast in forward, x = x.to(weight.dtype)"
        )
