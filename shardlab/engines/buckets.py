"""Parameters that travel together: their layout, and a flat buffer whose slots are their gradients.

While gradients only accumulate (``no_sync()``), ``param.grad`` is a view of its slot, and autograd adds the next micro-
batch to it in place. A gradient that will be sent is *sealed*: multiplied by 1/N on its way into the slot, so that the
sum over N ranks is the mean without another pass over the buffer (with a ``precision``, sums are divided after the cast
to the master's dtype). Its parameter then has no ``.grad``, so that autograd cannot write into a buffer that is being
sent. After an all-reduce the slots are the parameters' ``.grad``. (Of ZeRO-3 and FSDP see ``sharded_bucket.py``.)
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardlab.comm.events import Pending
from shardlab.engines.unused_params import mark_all_used, nobody_used, write_unused
from shardlab.partition.buckets import plan_buckets
from shardlab.partition.chunks import first_elements
from shardlab.partition.flat import FlatLayout, ParamSpec
from shardlab.vocabulary import Partition, dtype_name


class Bucket:
    """Parameters that travel together.

    Args:
        index: position among the buckets, which is the order of their collectives.
        layout: where each parameter is and which rank holds which chunk.
        params: the parameters in slot order, all of one dtype and device.
        rank: this one, among those that the layout divides it over.
    """

    def __init__(self, index: int, layout: FlatLayout, params: Sequence[nn.Parameter], rank: int) -> None:
        self.index = index
        self.layout = layout
        self.names = layout.names
        self.own = {piece.name: piece for piece in layout.pieces(rank)}
        self.own_chunk = slice(*layout.chunk(rank))  # of the buffer
        first = self.own_chunk.start
        self.places_in_chunk = {
            name: slice(piece.flat_start - first, piece.flat_stop - first) for name, piece in self.own.items()
        }
        self.params = tuple(params)
        self.shapes = [tuple(param.shape) for param in params]
        self.buffer: Tensor | None = None  # flat gradients, [padded_numel]; allocated when first needed
        self.views: list[Tensor] = []  # of the buffer, one per slot, in the parameters' shapes
        self.pieces: dict[str, Tensor] = {}  # ZeRO-1 and 2: what this rank steps of each parameter
        self.chunk: Tensor | None = None  # of the reduced gradients, whose parts are the ``.grad`` of the pieces
        self.gradient_dtype = self.params[0].dtype  # of the buffer, the dtype in which gradients are reduced
        self.is_cut = False  # its means belong to pieces, which are cut from contiguous parameters
        self.pending: Pending | None = None  # while it is being reduced
        self.holds_means = False
        self.unused: list[int] = []  # slots this rank sent as unused
        self._sealed: set[int] = set()  # slots that hold what will be sent
        self._looked_at = [place for _, place in first_elements(layout)]  # by some rank, to detect unused parameters
        self._elements: list[Tensor] = []  # views of the buffer there, [1] each
        self._num_own_references = 0  # to the buffer's memory

    def new_buffer(self, dtype: torch.dtype | None = None) -> Tensor:
        """A flat tensor, [padded_numel], in the parameters' dtype unless given; only the padding is set, to 0."""
        like = self.params[0]
        buffer = torch.empty(self.layout.padded_numel, dtype=dtype or like.dtype, device=like.device)
        # The padding travels too, and nothing writes to it; every slot is written before it is read or sent.
        buffer[self.layout.numel :].zero_()
        return buffer

    def slots_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat buffer, one per slot, in the parameters' shapes."""
        return [
            flat[slot.start : slot.stop].view(shape) for slot, shape in zip(self.layout.slots, self.shapes, strict=True)
        ]

    def show(self, flat: Tensor) -> None:
        """Make the parameters views of a flat buffer that holds their values."""
        # By ``.data``: the same parameter objects stay in the module, with their hooks and versions.
        for view, param in zip(self.slots_of(flat), self.params, strict=True):
            param.data = view

    def take(self, slot: int, gradient: Tensor) -> None:
        """Copy a gradient into its slot, unless it is there, and make ``param.grad`` the slot's view.

        ``param.grad`` must have the parameter's dtype. If gradients are reduced in another one, they add up in the slot
        if that has more bits, and ``param.grad`` is None; otherwise they add up in ``param.grad``.
        """
        if gradient.dtype != self.gradient_dtype:
            if self.gradient_dtype.itemsize > gradient.dtype.itemsize:
                # Not yet to be sent, and unscaled: in another dtype sums are divided only after the reduction.
                self.seal(slot, gradient, 1.0)
            return
        if self.buffer is None:
            self._allocate()
        view = self.views[slot]
        # From the second micro-batch on, autograd has added in place to this very view.
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
            self.params[slot].grad = view.detach()

    def seal(self, slot: int, gradient: Tensor, scale: float) -> None:
        """Put a gradient times ``scale`` into its slot, or add it if one is sealed already."""
        if self.buffer is None:
            self._allocate()
        gradient = gradient.detach()  # create_graph=True leaves a graph at it
        if slot in self._sealed:
            self.views[slot].add_(gradient, alpha=scale)
        else:
            # The gradient may be this very view: after no_sync() it is scaled in place.
            torch.mul(gradient, scale, out=self.views[slot])
            self._sealed.add(slot)
        # Or autograd would add the next gradient in place to what is being sent.
        self.params[slot].grad = None

    def drop(self, slot: int) -> None:
        """Forget what has added up in a slot."""
        self._sealed.discard(slot)

    def begin(self) -> None:
        """A backward begins: make sure that it writes over nothing that somebody has."""
        # As in torch, a gradient that was cleared stays what it is for whoever still has it.
        if self._is_kept():
            self.free()
        # Before the first gradient lands in it: means of an earlier backward, to which this one adds. Those that are
        # the parameters' ``.grad`` stay: autograd adds to them, and the sum is reduced again. The old mean is equal on
        # all ranks, so its mean is itself. Those of pieces are copied out of the buffer.
        if self.holds_means and self.buffer is not None:
            for piece in self.pieces.values():
                piece.grad = None if piece.grad is None else piece.grad.clone()
            self.chunk = None  # after a reduction in another dtype a tensor of its own, which would stay alive
        self.holds_means = False

    def _is_kept(self) -> bool:
        """Whether somebody else still has a tensor in the buffer, such as a gradient of an earlier step."""
        if self.buffer is None or self._sealed:
            return False  # what is sealed is nowhere else, and nobody's gradient
        storage = self.buffer.untyped_storage()
        known = [self.chunk, *(tensor.grad for tensor in (*self.params, *self.pieces.values()))]
        inside = sum(tensor is not None and tensor.untyped_storage()._cdata == storage._cdata for tensor in known)
        return bool(_num_references(self.buffer) > self._num_own_references + inside)

    def free(self) -> None:
        """Free the buffer, when its contents are no longer needed."""
        self.buffer = None
        # Each view would keep the whole buffer in memory.
        self.views, self._elements = [], []

    def forget(self) -> None:
        """Clear all gradients."""
        # The buffer stays, for the next backward to fill; whoever wants its memory back calls ``free()``.
        self._sealed.clear()
        self.chunk, self.holds_means = None, False

    def fill(self, scale: float) -> None:
        """Complete every slot before sending; ``scale`` as in ``seal``."""
        if self.buffer is None:
            self._allocate()
        # What no_sync() accumulated and this backward has not added to is still at the parameter, unscaled.
        for slot, param in enumerate(self.params):
            if param.grad is not None:
                self.seal(slot, param.grad, scale)
        # Before the -0 of unused slots is written, which adding +0 would erase.
        mark_all_used(self._elements)
        self.unused = [slot for slot in range(len(self.params)) if slot not in self._sealed]
        for slot in self.unused:
            write_unused(self.views[slot])
        self._sealed.clear()

    def hand_out(self) -> None:
        """Give every used parameter its mean, the view of its slot.

        Raises:
            RuntimeError: a parameter has got another dtype since the engine was built.
        """
        # No copy: the gradients share the buffer, which the next backward fills again.
        unused = nobody_used({slot: self.views[slot] for slot in self.unused})
        for slot, param in enumerate(self.params):
            if param.dtype != self.gradient_dtype:
                raise RuntimeError(
                    f"parameter {self.names[slot]!r}: it was {dtype_name(self.gradient_dtype)} when the engine was "
                    f"built and is {dtype_name(param.dtype)} now; convert the module before the engine is built"
                )
            if slot not in unused:
                # Another tensor object each time: module.to() gives the one at ``.grad`` other memory.
                param.grad = self.views[slot].detach()

    def _allocate(self) -> None:
        self.buffer = self.new_buffer(self.gradient_dtype)
        self._elements = [self.buffer[place : place + 1] for place in self._looked_at]
        # By ``.data``, so that each gradient has a version of its own, which tells whether the user has changed it.
        self.views = [
            view.data if self.is_cut else view.as_strided(param.shape, _strides(param)).data
            for view, param in zip(self.slots_of(self.buffer), self.params, strict=True)
        ]
        self._num_own_references = _num_references(self.buffer)


def _num_references(tensor: Tensor) -> int:
    """How many tensors share its memory."""
    # Private: there is no public way to ask.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _strides(param: nn.Parameter) -> tuple[int, ...]:
    """Strides of its gradient: the parameter's own if it is dense, as in torch, so that sums run in the same order."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride != expected:
            return torch.empty(param.shape, device="meta").stride()
        expected *= size
    return param.stride()


def build_buckets(
    params: Mapping[str, nn.Parameter],
    num_ranks: int,
    capacity_bytes: int,
    partition: Partition = Partition.ELEMENTS,
    rank: int = 0,
) -> list[Bucket]:
    """Divide parameters into buckets.

    Args:
        params: see ``bucket_layouts``.
        num_ranks: see ``bucket_layouts``.
        capacity_bytes: see ``bucket_layouts``.
        partition: see ``bucket_layouts``.
        rank: whose pieces a bucket names as its own.
    """
    return [
        Bucket(index, layout, [params[name] for name in layout.names], rank)
        for index, layout in enumerate(bucket_layouts(params, num_ranks, capacity_bytes, partition))
    ]


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
