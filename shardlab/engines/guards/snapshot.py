"""What can be told of tensors without reading them: where their data is, and how often they were written to."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

# Read of all tensors at once: guards ask several times a step, and a call of Python for each tensor would be felt.
# Place: address, shape and strides of the data. Version: autograd's counter of writes in place; those through ``.data``
# do not count. Of a gradient the object, and beside it its counter.
_READ: dict[str, Callable[[Sequence[Tensor]], list[Any]]] = {
    "place": lambda all_: [(one.data_ptr() if one.numel() else 0, one.shape, one.stride()) for one in all_],
    "version": lambda all_: [one._version for one in all_],
    "trains": lambda all_: [one.requires_grad for one in all_],
    "gradient": lambda all_: [one.grad for one in all_],
    "gradient_version": lambda all_: [(one.grad, -1 if one.grad is None else one.grad._version) for one in all_],
}


class Snapshot:
    """Of tensors by name, field by field.

    Args:
        tensors: by name; their fields are as they are now.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names, self._tensors = tuple(tensors), tuple(tensors.values())
        self._known = {field: read(self._tensors) for field, read in _READ.items()}

    def remember(self, field: str, names: Collection[str] | None = None) -> None:
        """A field is right as it is now: of these tensors, or of all."""
        now = _READ[field](self._tensors)
        if names is not None:
            rows = zip(self._names, now, self._known[field], strict=True)
            now = [new if name in names else old for name, new, old in rows]
        self._known[field] = now

    def forgive_gradients(self) -> None:
        """Gradients may change in place from here on."""
        self._known["gradient_version"] = [(None, -1)] * len(self._names)

    def changed(self, field: str) -> list[str]:
        """The names of tensors of which a field is another one now."""
        return list(compress(self._names, _differ(field, self._known[field], _READ[field](self._tensors))))


def _differ(field: str, before: Sequence[Any], now: Sequence[Any]) -> list[bool]:
    if field == "gradient":
        return list(map(operator.is_not, before, now))
    if field == "gradient_version":  # another object was replaced, and not changed in place
        return [old[0] is new[0] and old[1] != new[1] for old, new in zip(before, now, strict=True)]
    return list(map(operator.ne, before, now))
