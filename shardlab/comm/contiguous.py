"""Only contiguous, one-dimensional tensors travel: gloo reads the wrong memory of any other, without an error."""

from torch import Tensor


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
            f"buffer: a contiguous one-dimensional tensor is needed, not shape {tuple(buffer.shape)} "
            f"with strides {buffer.stride()}"
        )
