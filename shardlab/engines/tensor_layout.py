"""A layout applied to tensors: a chunk cut out of parameters, parameters read from a buffer, gradients written to one.

The buffer holds the chunks of all ranks, [padded_numel]. If a layout keeps a parameter in one stretch of it (flat),
what is read is a view; otherwise (dim-0) the parameter is copied from its stretches.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardlab.engines.unused_params import write_unused
from shardlab.partition.chunks import Layout, has_whole_rows, stretches_in_buffer


class LayoutOfTensors:
    """Where the parameters of one bucket are, on one rank.

    Args:
        layout: which elements which rank holds.
        rank: this one.
        shapes: of the parameters, by name.
    """

    def __init__(self, layout: Layout, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._chunk = shapes, layout.chunk(rank)
        self._stretches = stretches_in_buffer(layout)
        self.own = {piece.name: piece for piece in layout.pieces(rank)}

    def cut(self, params: Mapping[str, Tensor]) -> Tensor:
        """This rank's chunk of full parameters, [chunk], padded with zeros."""
        start, stop = self._chunk
        first = next(iter(params.values()))
        # A copy: a view would keep the full parameters in memory.
        shard = torch.zeros(stop - start, dtype=first.dtype, device=first.device)
        for name, piece in self.own.items():
            flat = params[name].detach().reshape(-1)
            shard[piece.flat_start - start : piece.flat_stop - start].copy_(flat[piece.param_start : piece.param_stop])
        return shard

    def piece_of(self, name: str, shard: Tensor) -> Tensor:
        """A parameter's part of a tensor of the chunk's size, a view: whole rows in their shape, anything else flat."""
        shape = self._shapes[name]
        if name not in self.own:
            return shard.new_empty((0, *(shape or (1,))[1:]))
        piece, offset = self.own[name], self._chunk[0]
        part = shard[piece.flat_start - offset : piece.flat_stop - offset]
        if piece.whole:
            part = part.view(shape)
        elif has_whole_rows(piece, shape):
            part = part.view(-1, *shape[1:])
        return part

    def read(self, name: str, buffer: Tensor) -> Tensor:
        """A full parameter read from the buffer."""
        shape, stretches = self._shapes[name], self._stretches[name]
        if len(stretches) == 1:
            start, stop, _ = stretches[0]
            # A view, which keeps the whole buffer in memory while any parameter of it is used.
            return buffer[start:stop].view(shape)
        # A copy: the buffer can go as soon as all parameters are read.
        full = buffer.new_empty(shape)
        for start, stop, offset in stretches:
            full.view(-1)[offset : offset + stop - start].copy_(buffer[start:stop])
        return full

    def write(self, name: str, gradient: Tensor | None, buffer: Tensor) -> None:
        """Put a gradient into its place in the buffer; None means that this rank did not use the parameter."""
        for start, stop, offset in self._stretches[name]:
            if gradient is None:
                write_unused(buffer[start:stop])
            elif len(self._stretches[name]) == 1:
                buffer[start:stop].view(gradient.shape).copy_(gradient.detach())
            else:
                buffer[start:stop].copy_(gradient.detach().reshape(-1)[offset : offset + stop - start])
