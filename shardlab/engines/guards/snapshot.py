"""What can be told of tensors without reading them: where their data is, and how often they were written to."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

# Read of all tensors at once: guards ask several times a step, and a call of Python for each tensor would be felt.
# Place: address (of what is empty 0), shape and strides of the data. Version: autograd's counter of writes in place;
# those through ``.data`` do not count.
_READ: dict[str, Callable[[Sequence[Tensor]], list[Any]]] = {
    "place": lambda all_: [(one.data_ptr(), one.shape, one.stride()) for one in all_],
    "version": lambda all_: [one._version for one in all_],
    "trains": lambda all_: [one.requires_grad for one in all_],
}


class Snapshot:
    """Of tensors by name, field by field; and of their gradients the objects and their counters of writes.

    Args:
        tensors: by name; their fields are as they are now.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names, self._tensors = tuple(tensors), tuple(tensors.values())
        self._known = {field: read(self._tensors) for field, read in _READ.items()}
        self._gradients: list[Tensor | None]
        self._versions: list[int | None]
        self.forget_gradients()

    def remember(self, field: str, names: Collection[str] | None = None) -> None:
        """A field is right as it is now: of these tensors, or of all."""
        now = _READ[field](self._tensors)
        if names is not None:
            rows = zip(self._names, now, self._known[field], strict=True)
            now = [new if name in names else old for name, new, old in rows]
        self._known[field] = now

    def remember_gradients(self) -> None:
        """They are right as they are now."""
        self._gradients = [one.grad for one in self._tensors]
        self._versions = [None if one is None else one._version for one in self._gradients]

    def forget_gradients(self) -> None:
        """They may be others from here on; none is kept here."""
        self._gradients = [None] * len(self._names)
        self.forgive_gradients()

    def forgive_gradients(self) -> None:
        """They may change in place from here on."""
        self._versions = [None] * len(self._names)

    def changed(self, field: str) -> list[str]:
        """The names of tensors of which a field, 'gradient' or 'gradient_version' is another one now."""
        if field == "gradient_version":  # another object was replaced, and not changed in place
            rows = zip(self._names, self._tensors, self._gradients, self._versions, strict=True)
            return [
                name for name, one, old, version in rows
                if old is not None and version is not None and one.grad is old and old._version != version
            ]  # fmt: skip
        if field == "gradient":
            differ = map(operator.is_not, self._gradients, [one.grad for one in self._tensors])
        else:
            differ = map(operator.ne, self._known[field], _READ[field](self._tensors))
        return list(compress(self._names, differ))
