"""The flat buffer in which gradients travel, and how they come into it: the same in every strategy with buckets.

A gradient that will be sent is moved into its slot of the buffer. Its parameter then has no ``.grad``, so that autograd
cannot write into what is being sent. In ``bucketed`` it is multiplied by 1/N: there, and nowhere else on its way, so
that the sum over N ranks is the mean without another pass. (``Shards`` divides the sums, which may have more bits: see
``precision.py``.)
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn, promote_types

from shardlab.engines.tensor_layout import Strides, TensorLayout, num_references
from shardlab.partition.chunks import Layout


class GradientBuffer:
    """The gradients of some parameters, which travel together.

    Args:
        params: by name, of one dtype and device; those of the layout are taken, in its order.
        layout: which elements of the buffer each parameter has.
        rank: whose chunk of the layout is this rank's.
        strides: of gradients that lie in the buffer otherwise than contiguous, by name.
        scale: what ``fill`` multiplies gradients by, and nothing else: one that is not 1 needs ``fills_on_arrival``.

    Attributes:
        sum_dtype: in which gradients are summed over the ranks.
        buffer: [padded_numel], in ``sum_dtype``; None where no gradient has come, or where it has been sent and its
            means are elsewhere.
        slots: its views, by name, in which parameters lie in one stretch; made together with it.
    """

    fills_on_arrival = False
    """Whether a gradient moves to the buffer when autograd brings it, or with all others, in one launch on a GPU."""
    adds_up = False
    """Whether gradients add up in the buffer inside ``no_sync()``, and not at the parameters."""
    keeps_buffer = True
    """Whether the buffer stays, with the means in it, for the next backward to fill."""
    _num_own_references = 0  # to the memory of the buffer: its own and its slots'

    def __init__(
        self, params: Mapping[str, nn.Parameter], layout: Layout, rank: int, strides: Mapping[str, Strides] | None =
        None, scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.params: Mapping[str, nn.Parameter] = {name: params[name] for name in layout.names}
        self.layout, first = layout, params[layout.names[0]]
        self.device, self.sum_dtype = first.device, first.dtype  # as they are now: a module may be converted
        shapes = {key: tuple(param.shape) for key, param in self.params.items()}
        self.tensors = TensorLayout(layout, rank, shapes, strides)
        self.scale = scale
        self._factor: Tensor | float = scale
        self.buffer: Tensor | None = None
        self.slots: dict[str, Tensor] = {}
        self._filled: set[str] = set()  # parameters whose gradients have been moved to the buffer, and not been sent

    def fill(self, name: str) -> None:
        """Move a gradient into its slot, times ``scale``, or add it to what is there; its parameter then has none."""
        if not self._filled:
            self._to_fill()
            # A number of Python's would become a tensor at each gradient. (Kernels of a device read it on the CPU.)
            self._factor = torch.full((), self.scale, dtype=promote_types(self.sum_dtype, torch.float32), device="cpu")
        param, slot = self.params[name], self.slots[name]
        assert param.grad is not None
        if name in self._filled:
            slot.add_(param.grad.detach(), alpha=self.scale)
        else:
            torch.mul(param.grad.detach(), self._factor, out=slot)
        self._filled.add(name)
        param.grad = None

    def fill_all(self) -> Tensor:
        """The buffer, ready to be sent: what is still at parameters is moved too; what this rank did not use is 0."""
        for name in self.params if self.fills_on_arrival else tuple(self._filled):
            if self.params[name].grad is not None:
                self.fill(name)
        buffer = self._to_fill()
        left = {key: one.grad for key, one in self.params.items() if key not in self._filled}
        self.tensors.write(left, buffer, self.slots)
        GradientBuffer.drop(self)  # of this class alone: the means are to come
        for param in self.params.values():
            param.grad = None  # or the next micro-batch would be added to it, and this one sent twice
        return buffer

    def _to_fill(self) -> Tensor:
        """The buffer to write gradients into: the one from before, or a new one."""
        # The one from before may still be in use: means are views of it, and so is what a user has kept of them. While
        # gradients are in it that have not been sent, it is none of that.
        if self.buffer is None or not (self._filled or num_references(self.buffer) == self._num_own_references):
            made = torch.zeros if self.layout.padding_numel else torch.empty  # no gradient is written to the padding
            self.buffer = made(self.layout.padded_numel, dtype=self.sum_dtype, device=self.device)
            self.slots = self.tensors.slots(self.buffer)
            self._num_own_references = num_references(self.buffer)
        return self.buffer

    def drop(self) -> None:
        """The gradients have been sent, or are cleared: forget those that were not sent."""
        self._filled, self._factor = set(), self.scale  # no memory is held between two steps
        if not self.keeps_buffer:
            self.buffer, self.slots = None, {}
