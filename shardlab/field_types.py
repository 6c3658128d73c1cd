"""The type of every option, checked by its annotation: a wrong one is named before anything computes with it."""

from dataclasses import Field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

from shardlab.experiment.options import CompareOptions

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
_NUMBERS: dict[type, type] = {int: Integral, float: Real}
_OF_ANY_TYPE = ("strategies", "workload", "wrap")  # checked where they are parsed


def check_types(options: CompareOptions) -> None:
    """Check every field against its annotation.

    Raises:
        ValueError: a field has a value of another type; the message names it and what is allowed.
    """
    for field in fields(CompareOptions):
        value = getattr(options, field.name)
        if field.name not in _OF_ANY_TYPE and not any(_is(value, kind) for kind in _kinds(field)):
            allowed = " or ".join(_WORDS[kind] for kind in _kinds(field))
            raise ValueError(f"{field.name}: {value!r:.60} was given; it must be {allowed}")
    if not -(2**63) <= options.seed < 2**63:
        raise ValueError(f"seed: {options.seed} was given; it must be a whole number of 64 bits")


def _kinds(field: "Field[Any]") -> tuple[type, ...]:
    return get_args(field.type) or (field.type,)


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, _NUMBERS.get(kind, kind))
