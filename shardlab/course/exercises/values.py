"""Results as values: plain ones that travel from a rank, the numbers in them, and the first place where two differ."""

from collections.abc import Mapping, Sequence
from math import isclose, isnan

import numpy as np
import torch
from torch import Tensor

from shardlab.vocabulary import class_of

RELATIVE = {torch.float64: 1e-9}  # what another order of summation may change
RELATIVE_OF_OTHERS = 1e-5
PLAIN = (bool, int, float, str, type(None))


def plain(value: object) -> object:
    """``value`` with tensors detached and copied, so that nothing of the learner's own classes leaves the rank.

    Raises:
        TypeError: it holds something else than tensors, numbers, text, lists, tuples, dicts and None, or NumPy's.
    """
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor).cpu().clone()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    if type(value) in PLAIN:
        return value
    raise TypeError(
        f"the result holds {class_of(value)}; return tensors, numbers, text, None, and lists and dicts of them"
    )


def whole_number(value: object) -> int | None:
    """The whole number that ``value`` is, be it an int, a float, a tensor's or NumPy's; None if it is none."""
    number = plain(value)
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return int(number) if isinstance(number, int | float) and float(number).is_integer() else None


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Both numbers with as few digits as tell them apart, but at least six."""
    digits = next((digits for digits in range(6, 17) if f"{one:.{digits}g}" != f"{other:.{digits}g}"), 17)
    return f"{one:.{digits}g}", f"{other:.{digits}g}"


def numbers_in(value: object) -> list[float]:
    """All numbers of a plain value in order."""
    if isinstance(value, Tensor):
        return [float(number) for number in value.flatten()]
    if isinstance(value, Mapping):
        return [number for item in value.values() for number in numbers_in(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers_in(item)]
    return [float(value)] if isinstance(value, bool | int | float) else []


def difference(wanted: object, found: object, place: str = "result") -> str:
    """The first place where ``found`` differs from ``wanted``, in words; empty if they are equal."""
    if isinstance(wanted, Tensor):
        return _of_tensors(wanted, found, place)
    if isinstance(found, Tensor):
        found = found.tolist() if isinstance(wanted, list | tuple) else found.item() if found.numel() == 1 else found
    if isinstance(wanted, Mapping):
        return _of_mappings(wanted, found, place)
    if isinstance(wanted, list | tuple):
        return _of_sequences(wanted, found, place)
    equal = not isinstance(found, Tensor) and wanted == found
    if isinstance(wanted, float) and isinstance(found, int | float):
        equal = isclose(wanted, found, rel_tol=1e-9) or (isnan(wanted) and isnan(found))
    return "" if equal else f"{place}: {wanted!r} is wanted, {shortened(found)} was found"


def differences(wanted: object, found: object, place: str = "result") -> list[str]:
    """``difference`` of each part of a dict with the same keys, else of the whole."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping) and set(wanted) == set(found):
        return [difference(value, found[key], f"{place}[{key!r}]") for key, value in wanted.items()]
    return [difference(wanted, found, place)]


def shortened(value: object) -> str:
    """The value in at most 60 characters."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_tensors(wanted: Tensor, found: object, place: str) -> str:
    if not isinstance(found, Tensor):
        return f"{place}: a tensor of {wanted.numel()} elements is wanted, {shortened(found)} was found"
    for name, one, other in (("shape", [*wanted.shape], [*found.shape]), ("dtype", wanted.dtype, found.dtype)):
        if one != other:
            return f"{place}: {name} {one} is wanted, {other} was found"
    relative = RELATIVE.get(wanted.dtype, RELATIVE_OF_OTHERS)
    is_close = torch.isclose(found, wanted, rtol=relative, atol=1e-12, equal_nan=True)
    wrong = (~is_close).flatten().nonzero().flatten().tolist()
    if not wrong:
        return ""
    element, size = wrong[0], wanted.element_size()
    is_wanted, was_found = told_apart(wanted.flatten()[element].item(), found.flatten()[element].item())
    return (
        f"{place}, element {element} (bytes {element * size} to {(element + 1) * size - 1}): "
        f"{is_wanted} is wanted, {was_found} was found; {len(wrong)} of {wanted.numel()} elements differ"
    )


def _of_mappings(wanted: Mapping[object, object], found: object, place: str) -> str:
    if not isinstance(found, Mapping):
        return f"{place}: a dict is wanted, {shortened(found)} was found"
    if missing := [key for key in wanted if key not in found]:
        return f"{place}: {missing[0]!r} is missing; it should be {shortened(wanted[missing[0]])}"
    if others := [key for key in found if key not in wanted]:
        return f"{place}: {others[0]!r} should not be there; it is {shortened(found[others[0]])}"
    return next(filter(None, differences(wanted, found, place)), "")


def _of_sequences(wanted: Sequence[object], found: object, place: str) -> str:
    if not isinstance(found, list | tuple):
        return f"{place}: a list is wanted, {shortened(found)} was found"
    differences = (
        difference(ours, theirs, f"{place}[{index}]")
        for index, (ours, theirs) in enumerate(zip(wanted, found, strict=False))
    )
    first = next(filter(None, differences), "")
    if first or len(wanted) == len(found):
        return first
    items, were = "item is" if len(wanted) == 1 else "items are", "was" if len(found) == 1 else "were"
    return f"{place}: {len(wanted)} {items} wanted, {len(found)} {were} found"
