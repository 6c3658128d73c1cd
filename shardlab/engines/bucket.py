"""Parameters side by side in flat memory, and the flat buffer in which their gradients travel.

A gradient that will be sent is moved into its slot of the buffer, times 1/N, so that the sum over N ranks is the mean
without another pass (with a ``precision``, sums are divided after the cast to the master weights' dtype). Its parameter
then has no ``.grad``, so that autograd cannot write into what is being sent.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardlab.comm.events import Pending
from shardlab.engines.tensor_layout import TensorLayout, contiguous
from shardlab.partition.buckets import plan_buckets
from shardlab.partition.flat import FlatLayout, ParamSpec
from shardlab.vocabulary import Partition


class Bucket:
    """Gradients that travel together.

    Args:
        index: place among the buckets, which is the order of their collectives.
        layout: where each parameter is, and which rank has which chunk.
        params: in slot order, of one dtype and device.
        rank: this one, among those of the layout.
        sum_dtype: in which gradients are summed; None for the parameters' own.
        is_cut: whether parameters lie in flat memory themselves, contiguous; else gradients lie as parameters do.
    """

    def __init__(
        self, index: int, layout: FlatLayout, params: Sequence[nn.Parameter], rank: int, sum_dtype: torch.dtype | None =
        None, *, is_cut: bool = False,
    ) -> None:  # fmt: skip
        self.index, self.layout, self.params = index, layout, tuple(params)
        named = dict(zip(layout.names, params, strict=True))
        shapes = {name: tuple(param.shape) for name, param in named.items()}
        strides = {} if is_cut else {name: _strides(param) for name, param in named.items()}
        self.tensors = TensorLayout(layout, rank, shapes, strides)
        self.chunk = slice(*layout.chunk(rank))  # of a flat buffer
        self.sum_dtype = sum_dtype or self.params[0].dtype
        self.buffer: Tensor | None = None  # [padded_numel]
        self.filled: set[int] = set()  # slots with what will be sent
        self.pending: Pending | None = None
        # Of ZeRO-1 and 2:
        self.means: Tensor | None = None  # this rank's chunk of them, [chunk]
        self.values: Tensor  # all parameters, [padded_numel]
        self.master: Tensor | None = None  # this rank's chunk of them, unrounded; None where nothing is rounded
        self.whole: Tensor | None = None  # all master weights, while they are shown

    @property
    def adds_up(self) -> bool:
        """Whether gradients add up here inside ``no_sync()`` too: in more bits than those they are computed in."""
        return self.sum_dtype.itemsize > self.params[0].element_size()

    def flat(self, dtype: torch.dtype) -> Tensor:
        """A new flat tensor, [padded_numel]; of it only the padding is set, to 0."""
        flat = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.params[0].device)
        flat[self.layout.numel :].zero_()  # it travels too, and nothing writes to it
        return flat

    def slots(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor, one for each parameter, in its shape."""
        return [self.tensors.read(name, flat) for name in self.layout.names]

    def slot(self, flat: Tensor, slot: int) -> Tensor:
        """One of them."""
        return self.tensors.read(self.layout.names[slot], flat)

    def begin(self) -> None:
        """A backward begins: write over nothing that somebody has."""
        # What is filled is nobody's gradient; else a view outside may be one that the user has kept, or a mean.
        if self.buffer is not None and not self.filled and _num_references(self.buffer) > 1:
            self.buffer = None

    def fill(self, slot: int, scale: float) -> None:
        """Move a gradient into its slot, times ``scale``, or add it to what is there."""
        if self.buffer is None:
            self.buffer = self.flat(self.sum_dtype)
        param, view = self.params[slot], self.slot(self.buffer, slot)
        assert param.grad is not None
        gradient = param.grad.detach()
        if slot in self.filled:
            view.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=view)
            self.filled.add(slot)
        param.grad = None

    def prepare(self, scale: float) -> Tensor:
        """The buffer, ready to be sent: what no_sync() has left is moved too, and what this rank did not use is 0."""
        if self.buffer is None:
            self.buffer = self.flat(self.sum_dtype)
        for slot, param in enumerate(self.params):
            if param.grad is not None:
                self.fill(slot, scale)
        for slot in range(len(self.params)):
            if slot not in self.filled:
                self.slot(self.buffer, slot).zero_()
        self.filled = set()
        return self.buffer

    def drop(self) -> None:
        """The gradients are cleared."""
        self.filled = set()  # the buffer stays, for the next backward to fill


def _num_references(tensor: Tensor) -> int:
    """How many tensors share its memory."""
    # Private: there is no public way to ask. One reference is that of the storage which is asked.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def _strides(param: nn.Parameter) -> tuple[int, ...]:
    """Strides of its gradient: the parameter's own if it is dense, as in torch, so that sums run in the same order."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride != expected:
            return contiguous(param.shape)
        expected *= size
    return param.stride()


def bucket_layouts(
    params: Mapping[str, nn.Parameter], num_ranks: int, capacity_bytes: int, partition: Partition
) -> tuple[FlatLayout, ...]:
    """Which parameters are in which bucket, and where; the same on every rank: only their order and sizes matter.

    Parameters that are frozen now get separate buckets, which cost nothing until they are unfrozen.

    Args:
        params: parameters by name, in the module's order.
        num_ranks: number of chunks of each bucket; 1 if nothing is sharded.
        capacity_bytes: bytes of a full bucket.
        partition: how a bucket's elements are divided over the ranks.

    Raises:
        ValueError: a capacity below 1.
    """
    if capacity_bytes < 1:
        raise ValueError(f"bucket_bytes: {capacity_bytes} is below 1; give the capacity of a bucket in bytes")
    specs = [ParamSpec(name, tuple(param.shape), param.element_size()) for name, param in params.items()]
    keys = [(param.dtype, param.device, param.requires_grad) for param in params.values()]
    return plan_buckets(specs, keys, num_ranks, capacity_bytes, partition)
