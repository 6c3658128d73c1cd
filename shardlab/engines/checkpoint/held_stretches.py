"""What one rank holds of a run: stretches of flattened tensors, under the names of the plain module.

In a tensor-parallel model the flattened tensor is this rank's slice of the parameter; ``slice_`` says which.

From here on, all strategies are alike. Optimizer state in the shape of its piece is saved by elements, like the piece.
Any other tensor (a step counter, a factored second moment) is saved whole, by the rank that holds the parameter's first
element: every holder has the same counter. State that is neither, of a parameter that is cut, is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm.trees import tensors_in
from shardlab.engines.any_engine import AnyEngine
from shardlab.partition.slices import TensorSlice
from shardlab.partition.uneven import chunk_bounds
from shardlab.vocabulary import class_of, dtype_name


class Kind(StrEnum):
    """What a tensor in a checkpoint is."""

    PARAMETER = "parameter"
    STATE = "state"
    BUFFER = "buffer"
    GRADIENT = "gradient"  # in no checkpoint, but gathered like the others


@dataclass(frozen=True)
class TensorShard:
    """Elements ``start`` to ``stop`` of a flattened tensor.

    Attributes:
        kind: what it is.
        name: of the parameter or buffer.
        key: in the parameter's optimizer state, for example 'exp_avg'; empty for other kinds.
        shape: of the tensor before it was flattened.
        start: first element.
        stop: one past the last.
        tensor: those elements, [stop - start].
        slice_: which part of a parameter of the whole model the tensor is; None for all of it.
    """

    kind: Kind
    name: str
    key: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor
    slice_: TensorSlice | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it is a part of a parameter, or of a slice of one."""
        return self.slice_ is not None or self.stop - self.start < prod(self.shape)

    def part(self, index: int, number: int) -> "TensorShard | None":
        """One of ``number`` nearly equal parts; None if it has no element."""
        bounds = chunk_bounds(self.stop - self.start, number)
        first, last = bounds[index], bounds[index + 1]
        if first == last:
            return None
        return replace(self, start=self.start + first, stop=self.start + last, tensor=self.tensor[first:last])


def parameter_shards(engine: AnyEngine) -> Iterator[TensorShard]:
    """The pieces this rank steps: master weights, if there are any."""
    return (shard for _, shard in _pieces(engine))


def gradient_shards(engine: AnyEngine) -> Iterator[TensorShard]:
    """The gradients of the pieces this rank steps; nothing for a parameter that no rank used."""
    for piece, shard in _pieces(engine):
        if (gradient := piece.grad) is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            yield replace(shard, kind=Kind.GRADIENT, key="gradient", tensor=_flat(dense))


def state_shards(engine: AnyEngine) -> Iterator[TensorShard]:
    """The tensors in the optimizer state of those pieces; nothing for a parameter that was never stepped.

    Raises:
        ValueError: state of a slice, or of a piece, has neither its shape nor a single element; a key is no str.
    """
    for piece, shard in _pieces(engine):
        name = shard.name
        for key, value in engine.optimizer.state.get(piece, {}).items():
            if not isinstance(value, Tensor):
                continue
            if not isinstance(key, str):
                raise ValueError(f"optimizer state: a tensor of {name!r} has the key {key!r}; give it a str, as 'step'")
            if value.shape == piece.shape:
                yield replace(shard, kind=Kind.STATE, key=key, tensor=_flat(value))
            elif shard.is_cut and value.numel() != 1:
                raise _uncut(name, key, f"a tensor of shape {tuple(value.shape)}", piece)
            elif shard.start == 0:
                yield TensorShard(Kind.STATE, name, key, tuple(value.shape), 0, value.numel(), _flat(value).clone())


def state_values(engine: AnyEngine) -> dict[str, dict[str, Any]]:
    """Optimizer state that is not tensors, for the parameters whose first element this rank holds.

    Raises:
        ValueError: of a slice, or of a piece, it contains tensors, which other ranks have others of; or there is state
            that belongs to no parameter.
    """
    _check_belongs(engine.optimizer)
    values: dict[str, dict[str, Any]] = {}
    for piece, shard in _pieces(engine):
        state = engine.optimizer.state.get(piece, {})
        found = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for key, value in found.items() if shard.is_cut else ():
            if has_large_tensors(value) or any(tensor.shape == piece.shape for tensor in tensors_in(value)):
                raise _uncut(shard.name, key, f"{class_of(value)} of tensors", piece)
        if found and shard.start == 0:
            values[shard.name] = found
    return values


def _check_belongs(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that torch's ``state_dict()`` would have, and a checkpoint, which goes by parameters, would lose.

    Raises:
        ValueError: there is some.
    """
    known = {"state", "param_groups"}
    lost = [key for key in optimizer.state if not isinstance(key, Tensor)] + list(optimizer.state_dict().keys() - known)
    if lost:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} keeps {lost[0]!r} beside the state of its parameters, and "
            "checkpoints have that alone; keep it in a parameter group, as in group['step'], or save it as an object "
            "of yours: engine.save(directory, name=object)"
        )


def has_large_tensors(value: Any) -> bool:
    """Whether a container of optimizer state holds tensors of more than one element."""
    return any(tensor.numel() > 1 for tensor in tensors_in(value))


def is_counter(parts: Sequence[tuple[Sequence[int], int, int]]) -> bool:
    """Whether state is one number for the whole parameter, though it looks like that of a piece on some rank.

    A counter of shape (1,) has the shape of a piece of one element.

    Args:
        parts: shape of the whole, start and stop, as all ranks have them.
    """
    numels = {prod(shape) for shape, _, _ in parts}
    return numels != {1} and (1 in numels or {(start, stop) for _, start, stop in parts} == {(0, 1)})


def buffer_shards(module: nn.Module) -> Iterator[TensorShard]:
    """The buffers in a state dict."""
    for name, value in persistent_buffers(module).items():
        # A copy: buffers may share memory, which the files' format refuses.
        yield TensorShard(Kind.BUFFER, name, "", tuple(value.shape), 0, value.numel(), _flat(value).clone())


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers by name, without those that a state dict leaves out.

    Reads a private set of ``nn.Module``: the public way, ``state_dict()``, touches the parameters too, which may be
    placeholders without memory.
    """
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def shape_of(engine: AnyEngine, name: str) -> tuple[int, ...]:
    """The shape of a parameter, even if it is a placeholder; in a tensor-parallel model, of the slice."""
    return tuple(engine.params[name].shape)


def whole_shape_of(engine: AnyEngine, name: str) -> tuple[int, ...]:
    """The shape of a parameter in the whole model."""
    return engine.slices[name].full_shape if name in engine.slices else shape_of(engine, name)


def described_parameters(engine: AnyEngine) -> dict[str, dict[str, Any]]:
    """What the manifest says about the parameters of the whole model, by name."""
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in engine.step_tensors().items()}
    return {name: {"shape": list(whole_shape_of(engine, name)), "dtype": dtypes[name]} for name in engine.params}


def described_buffers(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Likewise about the buffers."""
    buffers = persistent_buffers(module).items()
    return {name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)} for name, value in buffers}


def with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Submodules that add extra state to a state dict."""
    plain = nn.Module.get_extra_state
    return {name: part for name, part in module.named_modules() if type(part).get_extra_state is not plain}


def _pieces(engine: AnyEngine) -> Iterator[tuple[Tensor, TensorShard]]:
    """What this rank steps, without parameters that have no elements: each piece, and as a shard of its parameter."""
    tensors = engine.step_tensors()
    for name, (start, stop) in engine.owned().items():
        if start < stop:
            piece, shape = tensors.by_name(name), shape_of(engine, name)
            slice_ = engine.slices.get(name)
            yield piece, TensorShard(Kind.PARAMETER, name, "", shape, start, stop, _flat(piece), slice_)


def _uncut(name: str, key: str, what: str, piece: Tensor) -> ValueError:
    return ValueError(
        f"optimizer state: {key!r} of parameter {name!r} is {what}, and this rank steps a piece of shape "
        f"{tuple(piece.shape)}, so the whole state cannot be made from it; use an optimizer whose state has the shape "
        "of what it steps, such as AdamW, or, unless tensor parallelism slices it, a partition of whole parameters"
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)
