"""Where the parameters of one bucket are: in the chunk of a rank, and in the buffer of all chunks.

``partition`` says it in elements, of any layout; here it becomes views of tensors and copies from and to them.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from shardlab.partition.chunks import Layout, Piece, stretches_in_buffer

Strides = tuple[int, ...]


class TensorLayout:
    """Where the parameters of one bucket are, on one rank.

    Args:
        layout: which elements which rank holds.
        rank: this one.
        shapes: of the parameters, by name.
        strides: of those that lie in the buffer otherwise than contiguous.
    """

    def __init__(
        self, layout: Layout, rank: int, shapes: Mapping[str, tuple[int, ...]],
        strides: Mapping[str, Strides] | None = None,
    ) -> None:  # fmt: skip
        self._layout, self._shapes, self._stretches = layout, shapes, stretches_in_buffer(layout)
        # All or none: a view of one row beside copies of the others would keep the buffer in memory too.
        self.are_copied = any(len(stretches) > 1 for stretches in self._stretches.values())
        first = layout.chunk(rank)[0]
        self.own = {piece.name: piece for piece in layout.pieces(rank)}
        # Shape, strides and first element: what makes a view of a flat tensor, by one call of torch.
        self._pieces_at, self._slots_at = {}, {}
        for name, piece in self.own.items():  # in the chunk
            shape = _shape_of(piece, shapes[name])
            self._pieces_at[name] = shape, contiguous(shape), piece.flat_start - first
        for name, stretches in self._stretches.items():  # in the buffer, where it lies there in one stretch
            if len(stretches) == 1:
                shape = shapes[name]
                self._slots_at[name] = shape, (strides or {}).get(name, contiguous(shape)), stretches[0][0]

    def cut(self, params: Mapping[str, Tensor], ranks: range) -> Tensor:
        """The chunks of some ranks, which lie side by side, of full parameters; padded with zeros."""
        first, (start, stop) = next(iter(params.values())), (ranks.start, ranks.stop)
        begin, end = self._layout.bounds[start], self._layout.bounds[stop]
        # A copy: a view would keep the full parameters in memory.
        chunk = torch.zeros(end - begin, dtype=first.dtype, device=first.device)
        for piece in (piece for rank in ranks for piece in self._layout.pieces(rank)):
            flat = params[piece.name].detach().reshape(-1)
            chunk[piece.flat_start - begin : piece.flat_stop - begin].copy_(flat[piece.param_start : piece.param_stop])
        return chunk

    def piece_of(self, name: str, chunk: Tensor) -> Tensor:
        """A parameter's part of this rank's chunk, a view: whole rows in their shape, anything else flat."""
        if name not in self.own:
            return chunk.new_empty((0, *(self._shapes[name] or (1,))[1:]))
        shape, strides, start = self._pieces_at[name]
        return chunk.as_strided(shape, strides, int(chunk.storage_offset()) + start)

    def slot(self, name: str, buffer: Tensor) -> Tensor:
        """The view of the buffer, [padded_numel], in which a parameter lies in one stretch, to read from or write into.

        One without elements gets a tensor of its own: its view would begin where another parameter does.
        """
        if name not in self._slots_at:
            return buffer.new_empty(self._shapes[name])
        shape, strides, start = self._slots_at[name]
        return buffer.as_strided(shape, strides, int(buffer.storage_offset()) + start)

    def slots(self, buffer: Tensor) -> dict[str, Tensor]:
        """The slots of all parameters that lie in one stretch, or have no elements."""
        return {name: self.slot(name, buffer) for name in self._shapes if len(self._stretches[name]) < 2}

    def full(self, name: str, buffer: Tensor) -> Tensor:
        """A full parameter in its shape: its slot, or a copy where one of the bucket lies in several stretches."""
        if not self.are_copied:  # the whole buffer stays in memory while any parameter of it is used
            return self.slot(name, buffer)
        full = buffer.new_empty(self._shapes[name])  # the buffer can go as soon as all parameters are read
        for start, stop, offset in self._stretches[name]:
            full.view(-1)[offset : offset + stop - start].copy_(buffer[start:stop])
        return full

    def write(self, gradients: Mapping[str, Tensor | None], buffer: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Copy full gradients into the buffer, cast to its dtype.

        Args:
            gradients: by name; None becomes zeros: this rank did not use the parameter, and another may have.
            buffer: [padded_numel]; what belongs to other parameters, and its padding, is left as it is.
            slots: of the buffer.
        """
        places, values = [], []
        for name, gradient in gradients.items():
            if gradient is not None and name in self._slots_at:
                places.append(slots[name])
                values.append(gradient.detach())
                continue
            for start, stop, offset in self._stretches[name]:
                if gradient is None:
                    buffer[start:stop].zero_()
                else:
                    buffer[start:stop].copy_(gradient.detach().reshape(-1)[offset : offset + stop - start])
        if places:
            torch._foreach_copy_(places, values)  # one launch on a device


def num_references(tensor: Tensor) -> int:
    """How many tensors share its memory."""
    # Private: there is no public way to ask. One reference is that of the storage which is asked.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def contiguous(shape: tuple[int, ...]) -> Strides:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _shape_of(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    """In which a rank has its piece of a parameter: whole rows of dim 0, or flat."""
    if piece.whole:
        return shape
    row = prod(shape[1:])
    is_cut = len(shape) < 2 or not row or piece.param_start % row or piece.param_stop % row
    return (piece.numel,) if is_cut else (piece.numel // row, *shape[1:])
