"""What a collective is handed: flat buffers, and the part of a buffer that belongs to each rank.

Only contiguous, one-dimensional tensors are sent: gloo reads the wrong memory of any other, without an error.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from shardlab.comm.transports.base import Bounds
from shardlab.partition.chunks import even_bounds


def flattened(tensor: Tensor) -> Tensor:
    """The same elements, one-dimensional and contiguous: the tensor's own memory where it is so, else a copy."""
    return tensor.detach().contiguous().view(-1)


def copy_back(flat: Tensor, tensor: Tensor) -> None:
    """Write ``flat`` into a tensor of as many elements, unless it is that tensor's own memory."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def require_flat(buffer: Tensor) -> None:
    """Raise ValueError, naming shape and strides, unless the buffer is contiguous and one-dimensional."""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"buffer: shape {tuple(buffer.shape)} with strides {buffer.stride()} is given; it must be contiguous and "
            "one-dimensional"
        )


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
        raise ValueError(f"bounds: {bounds} is given; {num_ranks + 1} offsets ending at {buffer.numel()} are needed")
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
        raise ValueError(f"sizes: {sizes} is given; {num_ranks} numbers adding up to {buffer.numel()} are needed")
    return list(sizes)
