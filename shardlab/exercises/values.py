"""Results as values: plain ones that travel from a rank, the numbers in them, and the first place where two differ."""

from collections.abc import Mapping, Sequence
from math import isclose

import torch
from torch import Tensor

from shardlab.vocabulary import class_of

RELATIVE = {torch.float64: 1e-9}  # what another order of summation may change
RELATIVE_OF_OTHERS = 1e-5
PLAIN = (bool, int, float, str, type(None))


def plain(value: object) -> object:
    """``value`` with tensors detached and copied, so that nothing of the learner's own classes leaves the rank.

    Raises:
        TypeError: it holds something else than tensors, numbers, text, lists, tuples, dicts and None.
    """
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor).cpu().clone()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, range):
        return list(value)
    if type(value) in PLAIN:
        return value
    raise TypeError(
        f"the result holds {class_of(value)}; return tensors, numbers, text, None, and lists and dicts of them"
    )


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
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(wanted, Mapping):
        return _of_mappings(wanted, found, place)
    if isinstance(wanted, list | tuple):
        return _of_sequences(wanted, found, place)
    is_number = isinstance(wanted, int | float) and isinstance(found, int | float)
    equal = isclose(wanted, found, rel_tol=1e-9) if is_number and isinstance(wanted, float) else wanted == found  # type: ignore[arg-type]
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
    for name in ("shape", "dtype"):
        of_wanted, of_found = (getattr(tensor, name) for tensor in (wanted, found))
        if of_wanted != of_found:
            words = [str(list(each)) if name == "shape" else str(each) for each in (of_wanted, of_found)]
            return f"{place}: {name} {words[0]} is wanted, {words[1]} was found"
    wrong = wrong_elements(wanted, found).flatten().nonzero().flatten().tolist()
    if not wrong:
        return ""
    element, size = wrong[0], wanted.element_size()
    return (
        f"{place}, element {element} (bytes {element * size} to {(element + 1) * size - 1}): "
        f"{wanted.flatten()[element].item():g} is wanted, {found.flatten()[element].item():g} was found; "
        f"{len(wrong)} of {wanted.numel()} elements differ"
    )


def wrong_elements(wanted: Tensor, found: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype differ by more than rounding."""
    return ~torch.isclose(found, wanted, rtol=RELATIVE.get(wanted.dtype, RELATIVE_OF_OTHERS), atol=1e-12)


def _of_mappings(wanted: Mapping[object, object], found: object, place: str) -> str:
    if not isinstance(found, Mapping):
        return f"{place}: a dict is wanted, {shortened(found)} was found"
    if missing := [key for key in wanted if key not in found]:
        return f"{place}: {missing[0]!r} is missing; it should be {shortened(wanted[missing[0]])}"
    if others := [key for key in found if key not in wanted]:
        return f"{place}: {others[0]!r} should not be there; it is {shortened(found[others[0]])}"
    differences = (difference(value, found[key], f"{place}[{key!r}]") for key, value in wanted.items())
    return next(filter(None, differences), "")


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
    return f"{place}: {_items(wanted, 'is', 'are')} wanted, {len(found)} {_verb(found, 'was', 'were')} found"


def _items(values: Sequence[object], one: str, many: str) -> str:
    return f"{len(values)} item{'' if len(values) == 1 else 's'} {_verb(values, one, many)}"


def _verb(values: Sequence[object], one: str, many: str) -> str:
    return one if len(values) == 1 else many
