"""What can be told of tensors without reading them: where their data is, and how often they were written to."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

# Place: address, shape and strides of the data. Version: autograd's counter of writes in place; those through ``.data``
# do not count. Of a gradient the object, and beside it its counter.
_READ: dict[str, Callable[[Tensor], Any]] = {
    "place": lambda tensor: (tensor.data_ptr() if tensor.numel() else 0, tensor.shape, tensor.stride()),
    "version": lambda tensor: tensor._version,
    "trains": lambda tensor: tensor.requires_grad,
    "gradient": lambda tensor: tensor.grad,
    "gradient_version": lambda tensor: (tensor.grad, -1 if tensor.grad is None else tensor.grad._version),
}
FIELDS = tuple(_READ)


class Snapshot:
    """Of tensors by name, field by field.

    Args:
        tensors: by name; their fields are as they are now.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._known: dict[str, dict[str, Any]] = {}
        for field in FIELDS:
            self.remember(field)

    def remember(self, field: str, names: Iterable[str] | None = None) -> None:
        """A field is right as it is now: of these tensors, or of all."""
        read = _READ[field]
        now = {name: read(self._tensors[name]) for name in (self._tensors if names is None else names)}
        self._known.setdefault(field, {}).update(now)

    def forgive_gradients(self) -> None:
        """Gradients may change in place from here on."""
        self._known["gradient_version"] = dict.fromkeys(self._tensors, (None, -1))

    def changed(self, field: str) -> list[str]:
        """The names of tensors of which a field is another one now."""
        read, known = _READ[field], self._known[field]
        return [name for name, tensor in self._tensors.items() if _differ(field, known[name], read(tensor))]


def _differ(field: str, before: Any, now: Any) -> bool:
    if field == "gradient":
        return before is not now
    if field == "gradient_version":  # another object was replaced, and not changed in place
        return before[0] is now[0] and bool(before[1] != now[1])
    return bool(before != now)
