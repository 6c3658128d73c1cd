"""The parts of a flat buffer that belong to the ranks of a group: given by the caller and checked, else equal."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from shardlab.comm.contiguous import require_flat
from shardlab.comm.transports.base import Bounds
from shardlab.partition.chunks import even_bounds


def bounds_of(buffer: Tensor, bounds: Bounds | None, num_ranks: int) -> Bounds:
    """Offsets of the ranks' chunks in a buffer, num_ranks + 1 of them; None for equal chunks.

    Raises:
        ValueError: the buffer is not flat, does not divide, or the bounds do not fit it.
    """
    require_flat(buffer)
    if bounds is None:
        if buffer.numel() % num_ranks:
            raise ValueError(
                f"buffer: {buffer.numel()} elements do not divide into {num_ranks} equal chunks; pass bounds"
            )
        return even_bounds(buffer.numel(), num_ranks)
    if len(bounds) != num_ranks + 1 or bounds[-1] != buffer.numel():
        raise ValueError(f"bounds: {num_ranks + 1} offsets ending at {buffer.numel()} are needed, not {bounds}")
    return bounds


def sizes_of(buffer: Tensor, sizes: Sequence[int] | None, num_ranks: int) -> list[int]:
    """Elements of each rank's part of a buffer; None for equal parts.

    Raises:
        ValueError: the buffer is not flat, does not divide, or the sizes do not add up to it.
    """
    if sizes is None:
        return [stop - start for start, stop in pairwise(bounds_of(buffer, None, num_ranks))]
    require_flat(buffer)
    if len(sizes) != num_ranks or sum(sizes) != buffer.numel():
        raise ValueError(f"sizes: {num_ranks} numbers adding up to {buffer.numel()} are needed, not {sizes}")
    return list(sizes)
