"""Operations that compute nothing and take no memory: each gives tensors of the right shape.

Their memory is what the system has promised and not yet handed out, so a module of 7 billion parameters needs little of
it. What is small has values (an overflow, a norm, a counter), and so have whole numbers, which may be sizes; all else
that is read is 0. So what depends on values (which expert a row takes) cannot be run.
"""

from collections.abc import Callable, Hashable, Iterator
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # no public way to learn shapes, strides and devices
from torch.utils._python_dispatch import TorchDispatchMode  # no public way to see every operation
from torch.utils._pytree import tree_map_only

from shardlab.comm.trees import tensors_in

SMALL, MANY = 64, 2**20  # elements: what is no larger is computed, of numbers with a point and of others


class WithoutValues(TorchDispatchMode):
    """Inside, operations compute nothing and take no memory; each is announced with its result.

    Args:
        ran: told of each operation that would compute.
        known: shapes of results, by operation and arguments; runs that share them find out each only once.
    """

    def __init__(
        self, ran: Callable[[Any, tuple[Any, ...], Any], None], known: "dict[Hashable, Any] | None" = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran, self._shapes = ran, FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Hashable, Any] = {} if known is None else known
        self._is_real: dict[Any, bool] = {}
        self._computes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operation, without its values."""
        kwargs = kwargs or {}
        if func not in self._is_real:
            self._is_real[func] = (
                func.is_view or torch.Tag.inplace_view in func.tags or _allocates(func) or func in _REAL
            )
        if self._computes:
            return func(*args, **kwargs)
        if self._is_real[func]:
            made = func(*args, **kwargs)
            # What is written into it may have no values, and then nothing is written.
            return made.zero_() if _allocates(func) and _has_values(made) else made
        if func.overloadpacket is _aten._assert_async:  # it would judge values that nobody has computed
            return None
        given = list(tensors_in((args, kwargs)))
        # oneDNN alone knows how much a recurrent layer keeps.
        if (given and all(map(_has_values, given))) or func.overloadpacket is _aten.mkldnn_rnn_layer:
            result = func(*args, **kwargs)
        elif func._schema.is_mutable:
            result = _written(func, args, kwargs)
        else:
            result = self._untouched(func, args, kwargs)
        self._ran(func, args, result)
        return result

    def with_values(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, which are made as they are without this."""
        while True:
            self._computes = True
            try:
                batch = next(batches, None)
            finally:
                self._computes = False
            if batch is None:
                return
            yield batch

    def _untouched(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = (func, _signature(args), _signature(tuple(kwargs.items())))
        if (known := self._known.get(key)) is None:
            with self._shapes:
                shapes_alone = tree_map_only(Tensor, _like, (args, kwargs))
                shaped = func(*shapes_alone[0], **shapes_alone[1])
            known = self._known[key] = tree_map_only(Tensor, _Shape, shaped)
        if not isinstance(known, _Shape):
            return tree_map_only(_Shape, _Shape.tensor, known)
        made = known.tensor()
        if made.dtype is torch.bool and _has_values(made):  # not False: 0 is finite, and equal to itself
            of_zeros = tree_map_only(Tensor, _readable, (args, kwargs))
            made.copy_(func(*of_zeros[0], **of_zeros[1]))
        return made


class _Shape:
    """Of a result."""

    def __init__(self, tensor: Tensor) -> None:
        self._size, self._stride, self._dtype, self._device = (
            tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        )  # fmt: skip
        self._has_values = _has_values(tensor)

    def tensor(self) -> Tensor:
        """A result of this shape. What may be read of it is 0, and not what lay in its memory before."""
        made = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
        return made.zero_() if self._has_values else made


def _signature(value: Any) -> Hashable:
    """What decides the shape of a result."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(map(_signature, value))
    return (type(value), value) if isinstance(value, _PLAIN) else object()  # which is like nothing else


_PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _readable(tensor: Tensor) -> Tensor:
    """A tensor as it is read: of what has no values, zeros."""
    return tensor if _has_values(tensor) else torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _has_values(tensor: Tensor) -> bool:
    """Whether it is computed: what is small (an overflow, a norm, a counter), and whole numbers, which may be sizes.

    A small view of large memory has none: nobody has written what it shows.
    """
    if not tensor.is_floating_point():
        return tensor.numel() <= MANY
    return tensor.numel() <= SMALL and tensor.untyped_storage().nbytes() <= SMALL * tensor.itemsize


_aten = torch.ops.aten
# The last four give views, though their schemas do not say so.
_REAL = {_aten._local_scalar_dense.default, _aten.set_.source_Storage, _aten.set_.source_Tensor,
         _aten.set_.source_Storage_storage_offset, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default,
         _aten.unsafe_chunk.default, _aten._unsafe_view.default}  # fmt: skip


def _allocates(func: Any) -> bool:
    return func.overloadpacket.__name__ in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation in place returns: the tensors that it would have written into."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    returns = func._schema.returns
    return None if not returns else found[0] if len(returns) == 1 else tuple(found)
