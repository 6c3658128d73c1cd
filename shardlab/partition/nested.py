"""A layout that several axes of a mesh cut, one after another: the first into groups of chunks, the next each group.

So what is divided over the first axis alone is one stretch of the buffer too: the chunks of its ranks, side by side.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

from shardlab.partition.chunks import Layout


class NestedChunk(NamedTuple):
    """The elements of this rank where a layout is divided over its first axes.

    Attributes:
        start: its first element, in the buffer.
        size: elements.
        ranks: of the layout, whose chunks these are together.
        cut: where the next axis divides it, from 0; empty behind the last.
    """

    start: int
    size: int
    ranks: range
    cut: tuple[int, ...]

    def within(self, outer: "NestedChunk") -> slice:
        """Its place in a chunk that it is a part of."""
        return slice(self.start - outer.start, self.start - outer.start + self.size)


def chunk_in(places: Iterable[tuple[int, int]]) -> int:
    """Which chunk a rank has, from its (place, size) on each axis, in the order in which these cut the layout."""
    return reduce(lambda chunk, axis: chunk * axis[1] + axis[0], places, 0)


def nested(layout: Layout, rank: int, sizes: Sequence[int]) -> list[NestedChunk]:
    """The chunks of a rank: undivided, divided over the first axis, over the first two, ...

    Args:
        layout: of all ranks.
        rank: of this layout.
        sizes: of the axes, the slowest first.
    """
    found = []
    for depth in range(len(sizes) + 1):
        num, step = prod(sizes[depth:]), prod(sizes[depth + 1 :])
        ranks = range(rank // num * num, rank // num * num + num)
        start, stop = layout.bounds[ranks.start], layout.bounds[ranks.stop]
        cut = tuple(bound - start for bound in layout.bounds[ranks.start : ranks.stop + 1 : step])
        found.append(NestedChunk(start, stop - start, ranks, cut if depth < len(sizes) else ()))
    return found
