"""What an engine puts on a module, and what is in its place in a copy: ``copy.deepcopy``, pickle and ``torch.save``.

A copy is a plain module that trains alone. Were it to take the engine along, it would gather the original's parameters
in its forward.
"""

from collections.abc import Callable
from typing import Any

from shardlab.engines.untraced import untraced


class OfThisModule:
    """Something that belongs to one module and not to its copies.

    Args:
        value: what it is.
        in_copies: what copies have instead; None or a function of a module, since a pickle must name it.
    """

    def __init__(self, value: Any, in_copies: Callable[..., None] | None) -> None:
        self.value, self._in_copies = value, in_copies

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _the_same, (self._in_copies,)


class ModuleHook(OfThisModule):
    """A forward hook or forward pre-hook, which ``torch.compile`` does not trace; in copies it does nothing."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__(untraced(hook), nothing)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self.value(*args, **kwargs)


def nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _the_same(value: Any) -> Any:
    return value
