"""The flat buffer in which gradients travel, and which parameters are in which.

It is ``bucketed``'s alone; from ``zero1`` on a bucket is a ``Shards``. A gradient that will be sent is moved into its
slot of the buffer, times 1/N: here, and nowhere else on its way, so that the sum over N ranks is the mean without
another pass. (``Shards`` divides the sums, which may have more bits: see ``precision.py``.) Its parameter then has no
``.grad``, so that autograd cannot write into what is being sent.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardlab.comm.events import Pending
from shardlab.engines.tensor_layout import TensorLayout, contiguous, num_references
from shardlab.partition.flat import FlatLayout


class Bucket:
    """Gradients that travel together.

    Args:
        index: of it among the buckets, which is the order of their collectives.
        layout: which elements of the buffer each parameter has.
        params: by name, in slot order, of one dtype and device.
        scale: what gradients are multiplied by on their way into the buffer: 1/N.

    Attributes:
        buffer: [padded_numel], of the parameters' dtype; None before the first gradient.
        pending: of the collective under way.
    """

    adds_up = False  # gradients add up at the parameters inside no_sync()
    fills_at_once = True  # so that one parameter's gradient alone is in memory twice

    def __init__(self, index: int, layout: FlatLayout, params: Mapping[str, nn.Parameter], scale: float) -> None:
        self.index, self.layout, self.params, self.scale = index, layout, params, scale
        shapes = {name: tuple(param.shape) for name, param in params.items()}
        self._tensors = TensorLayout(layout, 0, shapes, {name: _strides(param) for name, param in params.items()})
        self._like = next(iter(params.values())).new_empty(0)  # as they are now: a module may be converted
        self.buffer: Tensor | None = None
        self.pending: Pending | None = None
        self._filled: set[str] = set()  # what will be sent

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by parameter, in its shape."""
        return {name: self._tensors.slot(name, flat) for name in self.params}

    def fill(self, name: str) -> None:
        """Move a gradient into its slot, times 1/N, or add it to what is there; its parameter then has none."""
        if not self._filled:
            self._make_room()
        param, buffer = self.params[name], self.buffer
        assert param.grad is not None
        assert buffer is not None
        slot, gradient = self._tensors.slot(name, buffer), param.grad.detach()
        if name in self._filled:
            slot.add_(gradient, alpha=self.scale)
        else:
            torch.mul(gradient, self.scale, out=slot)
            self._filled.add(name)
        param.grad = None

    def _make_room(self) -> None:
        """Have a buffer, [padded_numel], that may be written to; before the first gradient that will be sent in it."""
        # The one from before may still be in use: each mean is a view of it, and so is what a user has kept of them.
        if self.buffer is None or num_references(self.buffer) > 1:
            self.buffer = self._like.new_empty(self.layout.padded_numel)

    def prepare(self) -> None:
        """Make the buffer ready to be sent: what no_sync() has left is moved too; what this rank did not use is 0."""
        if not self._filled:
            self._make_room()
        assert self.buffer is not None
        for name, param in self.params.items():
            if param.grad is not None:
                self.fill(name)
            elif name not in self._filled:
                self._tensors.slot(name, self.buffer).zero_()
        self._filled = set()

    def drop(self) -> None:
        """Forget what has been filled: the gradients are cleared."""
        self._filled = set()  # the buffer stays, for the next backward to fill


def _strides(param: nn.Parameter) -> tuple[int, ...]:
    """Strides of its gradient: the parameter's own if it is dense, as in torch, so that sums run in the same order."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride != expected:
            return contiguous(param.shape)
        expected *= size
    return param.stride()
