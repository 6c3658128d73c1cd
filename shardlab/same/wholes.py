"""Puts wholes together from the pieces that processes have noted, where all files are."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardlab.same.notes import Notes, Part, Place, UnlikeError


def place_by_hand(ranks: Sequence[Notes], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Give pieces their places that a script has divided without DTensor; whether there are some.

    A parameter that is ``k`` times as long along one dim in one process lies in pieces on ``k`` ranks in order, as
    tensor parallelism has them, whose ranks are neighbours.

    Args:
        ranks: notes of each, which are changed.
        shapes: of parameters in one process.

    Raises:
        UnlikeError: a parameter has another shape in one process, and no such.
    """
    found = False
    for rank, one in enumerate(ranks):
        for step in one.steps:
            for parts in (step.weights, step.gradients, step.stepped, step.after):
                for number, part in enumerate(parts):
                    if part.name in shapes and part.shape != shapes[part.name]:
                        parts[number], found = _placed(part, shapes[part.name], rank, len(ranks)), True
    return found


def _placed(part: Part, shape: tuple[int, ...], rank: int, num_ranks: int) -> Part:
    apart = [dim for dim, (size, own) in enumerate(zip(shape, part.shape, strict=False)) if size != own]
    dim = apart[0] if len(apart) == 1 and len(shape) == len(part.shape) and part.is_whole else -1
    count, left = divmod(shape[dim], part.shape[dim]) if dim >= 0 else (0, 1)
    if left or num_ranks % count:
        raise UnlikeError(f"{part.name!r} is {list(part.shape)} on the ranks and {list(shape)} in one process")
    place = [(0, size) for size in part.shape]
    place[dim] = (rank % count * part.shape[dim], part.shape[dim])
    return part._replace(shape=shape, place=tuple(place))


def wholes(ranks: Sequence[Iterable[Part]]) -> dict[str, list[Tensor | None]]:
    """By name, the whole tensor as each rank has it: its own pieces, and those of others where it has none.

    Args:
        ranks: the pieces of each.

    Returns:
        In place of a rank that holds nothing of a whole that others have entirely: None.

    Raises:
        UnlikeError: the pieces of all ranks leave out elements.
    """
    return {name: whole(name, parts) for name, parts in by_name(ranks).items()}


def by_name(ranks: Sequence[Iterable[Part]]) -> dict[str, list[list[Part]]]:
    """Of each name the pieces of each rank."""
    found: dict[str, list[list[Part]]] = {}
    for rank, parts in enumerate(ranks):
        for part in parts:
            found.setdefault(part.name, [[] for _ in ranks])[rank].append(part)
    return found


def whole(name: str, parts: list[list[Part]]) -> list[Tensor | None]:
    """One of ``wholes``."""
    every = [part for own in parts for part in own]
    if all(part.is_whole for part in every):
        return [own[0].value.reshape(own[0].shape) if own else None for own in parts]
    known = torch.zeros(every[0].shape, dtype=torch.bool)
    for part in every:
        part.of(known).fill_(True)
    if not known.all():
        raise UnlikeError(f"pieces of {name!r} of all ranks leave out {int((~known).sum())} of {known.numel()}")
    if any(part.adds_up for part in every):
        views = [_summed(every)]
    else:  # where no element lies on two ranks, all of them have one whole
        views = [[]] if sum(part.value.numel() for part in every) == known.numel() else parts
    made = []
    for own in views:
        value = torch.empty(every[0].shape, dtype=every[0].value.dtype)
        for part in (*reversed(every), *own):  # its own last
            part.of(value).copy_(part.value)
        made.append(value)
    return [made[rank % len(made)] for rank in range(len(parts))]


def _summed(every: list[Part]) -> list[Part]:
    """Of pieces that add up: those of one place once."""
    sums: dict[Place, Part] = {}
    for part in every:
        known = sums.get(part.place)
        sums[part.place] = part if known is None else known._replace(value=known.value + part.value)
    return list(sums.values())
