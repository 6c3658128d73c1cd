"""The types of a configuration's fields, checked by annotation: a wrong one is named before it is computed with."""

from collections.abc import Container
from dataclasses import Field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
_NUMBERS: dict[type, type] = {int: Integral, float: Real}


def check_types(config: Any, besides: Container[str]) -> None:
    """Check the fields of a dataclass against their annotations.

    Args:
        config: the dataclass; its fields are numbers, texts, truth values or None.
        besides: names of fields that are not checked.

    Raises:
        ValueError: a field has a value of another type; the message names it and what is allowed.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in besides and not any(_is(value, kind) for kind in _kinds(field)):
            allowed = " or ".join(_WORDS[kind] for kind in _kinds(field))
            raise ValueError(f"{field.name}: {value!r:.60} was given; it must be {allowed}")


def _kinds(field: "Field[Any]") -> tuple[type, ...]:
    return get_args(field.type) or (field.type,)


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, _NUMBERS.get(kind, kind))
