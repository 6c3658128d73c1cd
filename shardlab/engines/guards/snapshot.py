"""What can be told of a tensor without reading it: where its data is, and how often it was written to."""

from typing import Any, NamedTuple

from torch import Tensor


class Mark(NamedTuple):
    """A tensor, at one moment.

    Attributes:
        place: address, shape and strides of its data.
        version: autograd's counter of writes in place; those through ``.data`` do not count.
        trains: whether it requires a gradient.
        gradient: the object at ``.grad``.
        gradient_version: its counter; -1 without one, and where it may change.
    """

    place: tuple[Any, ...]
    version: int
    trains: bool
    gradient: Tensor | None
    gradient_version: int

    def changed(self, field: str, now: "Mark") -> bool:
        """Whether a field is another one now."""
        if field == "gradient":
            return self.gradient is not now.gradient
        if field == "gradient_version" and (self.gradient is not now.gradient or self.gradient_version < 0):
            return False  # another one: replaced, and not changed in place
        return bool(getattr(self, field) != getattr(now, field))


def mark(tensor: Tensor) -> Mark:
    """The mark of a tensor as it is now."""
    gradient = tensor.grad
    place = (tensor.data_ptr() if tensor.numel() else 0, tensor.shape, tensor.stride())
    return Mark(place, tensor._version, tensor.requires_grad, gradient, -1 if gradient is None else gradient._version)
