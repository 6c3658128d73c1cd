"""The pieces of parameters and gradients that this process holds, and their places in the whole.

Plain parameters are whole; DTensors (FSDP2, tensor parallelism), torch's first FSDP and our engines hold pieces.
Everything is read where it lies, and nothing is sent.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public way to a shard's place

from shardlab.engines.any_engine import AnyEngine
from shardlab.recording.global_hooks import inside
from shardlab.same.notes import Part, Place


class _Span(NamedTuple):
    """Elements of a flattened parameter, from ``start``, at ``offset`` in what holds them."""

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    size: int


_Flat = tuple[Tensor, list[_Span]]  # what FSDP1 keeps of one or several parameters in one tensor
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Pieces:
    """What one module, or one of our engines, holds of its parameters.

    Args:
        root: that trains.
        prefix: of all names, where there are several roots.

    Raises:
        ValueError: it is divided in a way that is not known.
    """

    def __init__(self, root: nn.Module | AnyEngine, prefix: str = "") -> None:
        self._engine = root if isinstance(root, AnyEngine) else None
        self.module = inside(root.module if isinstance(root, AnyEngine) else root)
        for one in self.module.modules():
            if isinstance(one, FSDPModule):  # what the script gathers ahead is gathered in its forward
                one.reshard()
        if self._engine is not None and self._engine.slices:
            raise ValueError("shardlab's tensor parallelism is not supported here yet; compare it by check_strategy")
        self._prefix = prefix
        self._flat = dict(self._of_first_fsdp())
        named = self.module.named_parameters() if self._engine is None else self._engine.params.items()
        self._params = {prefix + plain_name(name): param for name, param in named if id(param) not in self._flat}

    @property
    def names(self) -> dict[int, list[str]]:
        """Names by the identity of what an optimizer is given."""
        if self._engine is not None:
            return {id(one): [self._prefix + name] for name, one in self._engine.step_tensors().items()}
        plain = {id(param): [name] for name, param in self._params.items()}
        return plain | {key: [span.name for span in spans] for key, (_, spans) in self._flat.items()}

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that train."""
        flat = [span.name for one, spans in self._flat.values() if one.requires_grad for span in spans]
        return [name for name, param in self._params.items() if param.requires_grad] + flat

    @property
    def tied(self) -> list[str]:
        """Names of parameters that the module has under several."""
        every = [id(param) for _, param in self.module.named_parameters(remove_duplicate=False)]
        return [name for name, param in self._params.items() if every.count(id(param)) > 1]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name."""
        return {self._prefix + plain_name(name): one for name, one in self.module.named_buffers()}

    def weights(self) -> Iterator[Part]:
        """Pieces of the parameters, as they lie here."""
        if self._engine is not None:
            for name, (tensor, start, stop) in self._engine.resident_params().items():
                yield self._flat_part(name, start, stop, tensor.detach())
            return
        for name, param in self._params.items():
            yield part_of(name, param)
        for flat, spans in self._flat.values():
            yield from (_cut(flat.detach(), span) for span in spans)

    def gradients(self) -> Iterator[Part]:
        """Pieces of the gradients, of parameters that have one."""
        if self._engine is not None:
            owned = self._engine.owned()
            for name, tensor in self._engine.step_tensors().items():
                if tensor.grad is not None and name in owned:
                    yield self._flat_part(name, *owned[name], tensor.grad.detach())
            return
        for name, param in self._params.items():
            if param.grad is not None:
                yield part_of(name, param.grad)
        for flat, spans in self._flat.values():
            if flat.grad is not None:
                yield from (_cut(flat.grad.detach(), span) for span in spans)

    def unreduced(self) -> Iterator[tuple[str, Tensor]]:
        """What FSDP2 adds up of gradients until it may reduce them, by name; there is no public way to it."""
        names = {id(param): name for name, param in self._params.items()}
        states = [one._get_fsdp_state() for one in self.module.modules() if isinstance(one, FSDPModule)]
        for state in states:
            for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
                for one in group.fsdp_params:
                    plain = getattr(one, "_unsharded_param", None)
                    kept = (one.unsharded_accumulated_grad, plain.grad if plain is not None else None)
                    yield from ((names[id(one.sharded_param)], grad) for grad in kept if grad is not None)

    def _flat_part(self, name: str, start: int, stop: int, value: Tensor) -> Part:
        assert self._engine is not None
        shape = tuple(self._engine.params[name].shape)
        return Part(self._prefix + name, shape, ((start, stop - start),), value.reshape(-1), is_flat=True)

    def _of_first_fsdp(self) -> Iterator[tuple[int, _Flat]]:
        """What FSDP1 gives to optimizers, by identity: flat parameters, or this rank's part of each parameter."""
        for name, module in self.module.named_modules():
            handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
            if handle is None or (handle._use_orig_params and not handle.uses_sharded_strategy):
                continue
            flat, offset, spans = handle.flat_param, 0, []
            # There are none where nothing is divided.
            infos = getattr(flat, "_shard_param_infos", None) or [None] * len(flat._fqns)
            owns: Sequence[Any] = flat._params or [None] * len(flat._fqns)
            for fqn, shape, info, own in zip(flat._fqns, flat._shapes, infos, owns, strict=True):
                named = self._prefix + plain_name(f"{name}.{fqn}" if name else fqn)
                start = 0 if info is None else info.intra_param_start_idx or 0
                size = shape.numel() if info is None else info.numel_in_shard or 0
                span = _Span(named, tuple(shape), start, offset, size)
                if own is not None:
                    yield id(own), (own, [span._replace(offset=0)])
                offset += span.size
                spans.append(span)
            if not handle._use_orig_params:
                yield id(flat), (flat, spans)


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def part_of(name: str, tensor: Tensor) -> Part:
    """The piece of a plain tensor, which is the whole, or of a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Part(name, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), tensor)
    if any(type(one).__name__ == "_StridedShard" for one in tensor.placements):
        raise ValueError(f"{name!r} is divided twice along one dim (FSDP2 over tensor parallelism): not supported yet")
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place: Place = tuple(zip(offsets, sizes, strict=True))
    adds_up = any(one.is_partial() for one in tensor.placements)
    return Part(name, tuple(tensor.shape), place, tensor._local_tensor, adds_up=adds_up)


def _cut(flat: Tensor, span: _Span) -> Part:
    value = flat.reshape(-1)[span.offset : span.offset + span.size]
    return Part(span.name, span.shape, ((span.start, span.size),), value, is_flat=True)
