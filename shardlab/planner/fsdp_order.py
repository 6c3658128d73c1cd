"""In which order an FSDP backward gathers units and reduces their gradients.

Backward reaches the root first, since the model's output is the root's, then the wrapped units in the reverse order of
forward; when it reaches a unit, that unit and the next ``prefetch`` ones are gathered unless they are already. A unit's
gradients are complete, and are reduced, before backward reaches the next unit; the root's own, the embedding's among
them, come last of all. With units 1, 2, 3:

    prefetch 0    gather root, gather 3, reduce 3, gather 2, reduce 2, gather 1, reduce 1, reduce root
    prefetch 1    gather root, gather 3, gather 2, reduce 3, gather 1, reduce 2, reduce 1, reduce root
"""

from collections.abc import Iterator, Sequence


def backward_order(units: Sequence[str], root: str | None, prefetch: int) -> Iterator[tuple[str, str]]:
    """Pairs of 'gather' or 'reduce' and the unit's name.

    Args:
        units: the wrapped units in the order of forward.
        root: name of the unit of all other parameters; None where there are none.
        prefetch: units gathered ahead, 0 or more.
    """
    reached = ([] if root is None else [root]) + list(reversed(units))
    num_gathered = 0
    for place, unit in enumerate(reached):
        ahead = min(place + 1 + prefetch, len(reached))
        for later in reached[num_gathered:ahead]:
            yield "gather", later
        num_gathered = max(num_gathered, ahead)
        if unit != root:
            yield "reduce", unit
    if root is not None:
        yield "reduce", root
