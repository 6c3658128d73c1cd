"""The tensors in whatever a module or a process group takes or returns: nested containers, and dataclasses in them.

Objects of other classes are leaves: what is inside them is neither found nor changed.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset((tuple, list, dict))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    # The plain containers first: a recorder asks for the tensors of every call of a unit.
    kind = type(value)
    if kind in _PLAIN:
        entries: Iterable[Any] = value.values() if kind is dict else value
    else:
        entries = chain(_entries(value), _attributes(value).values())
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry
        else:
            yield from tensors_in(entry)


def map_tensors(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """``value`` with ``function`` of each tensor, and of whatever else ``is_leaf`` names, in its place.

    A container in which that changes nothing stays the same object; others are copied with all else that they hold, and
    no constructor of the user's is called. A tensor that is there twice is replaced by one.
    """
    return _mapped(function, value, is_leaf, {})


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``, see ``map_tensors``."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _mapped(
    function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None, known: dict[int, tuple[Any, Any]]
) -> Any:
    if id(value) not in known:
        if isinstance(value, Tensor) or (is_leaf is not None and is_leaf(value)):
            made = function(value)
        else:
            made = _with_mapped_entries(value, lambda entry: _mapped(function, entry, is_leaf, known))
        known[id(value)] = (value, made)  # with the value itself, so that nothing else gets its id meanwhile
    return known[id(value)][1]


def _with_mapped_entries(value: Any, mapped: Callable[[Any], Any]) -> Any:
    before = [*_entries(value), *_attributes(value).values()]
    if all(mapped(entry) is entry for entry in before):
        return value
    if isinstance(value, tuple):
        entries = [mapped(entry) for entry in value]
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    if isinstance(value, set | frozenset):
        return type(value)(mapped(entry) for entry in value)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({key: mapped(entry) for key, entry in value.items()})  # type: ignore[call-arg]
    made = copy.copy(value)  # keeps what a list or dict of the user's class has beside its entries
    places: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        places = value.items()
    elif isinstance(value, list | deque):
        places = enumerate(value)
    for key, entry in places:
        made[key] = mapped(entry)
    for name, entry in _attributes(value).items():
        object.__setattr__(made, name, mapped(entry))  # a frozen one too
    return made


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset | deque) else ()


def _attributes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that have been set; those with ``init=False`` may not be."""
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
