"""A range of ``numel`` elements cut into one contiguous chunk per rank: who holds which element.

``even_bounds`` give every rank ceil(numel / num_ranks) elements of a padded range, 10 over 3 are 4, 4, 4 with 2 of
padding: equal chunks are what NCCL's one-call reduce-scatter needs.

Where the range holds parameters, a ``Layout`` says which ``Piece`` of each lies in a rank's chunk: what flat and dim-0
layouts have in common.

Legend: offsets are in elements, chunk ``r`` is ``bounds[r] <= index < bounds[r + 1]``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from shardlab.vocabulary import Partition


def parse_partition(partition: Partition | str) -> Partition:
    """The member of ``Partition`` with this name.

    Raises:
        ValueError: there is none; the message lists the allowed names.
    """
    try:
        return Partition(partition)
    except ValueError:
        raise ValueError(f"partition: {partition!r} is not one of {', '.join(Partition)}") from None


def require_count(field: str, value: int, minimum: int) -> None:
    """Raise ValueError, naming ``field``, when ``value`` is below ``minimum``."""
    if value < minimum:
        raise ValueError(f"{field}: {value} is too small; it must be at least {minimum}")


def even_bounds(numel: int, num_ranks: int) -> tuple[int, ...]:
    """The ``num_ranks + 1`` offsets of equal chunks of ceil(numel / num_ranks) elements.

    The last offset is the padded length, less than ``num_ranks`` elements above ``numel``.

    Raises:
        ValueError: ``numel`` or ``num_ranks`` is too small.
    """
    require_count("numel", numel, 0)
    require_count("num_ranks", num_ranks, 1)
    return tuple(rank * -(-numel // num_ranks) for rank in range(num_ranks + 1))


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the arithmetic needs it: ``itemsize`` is bytes per element, shape ``()`` is a scalar."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        require_count(f"itemsize of {self.name!r}", self.itemsize, 1)

    @cached_property
    def numel(self) -> int:
        """Elements; 1 for a 0-d parameter."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one rank's chunk.

    ``flat_start`` to ``flat_stop`` is its place in the flat range, ``param_start`` to ``param_stop`` its place in the
    flattened parameter; both have ``numel`` elements. ``whole`` says that the piece is the full parameter.
    """

    name: str
    flat_start: int
    flat_stop: int
    param_start: int
    param_stop: int
    whole: bool

    @property
    def numel(self) -> int:
        """Elements of the piece, at least 1."""
        return self.flat_stop - self.flat_start


@dataclass(frozen=True)
class Layout(ABC):
    """Parameters in a range of elements, of which rank r holds ``bounds[r]`` to ``bounds[r + 1]``; padding included."""

    bounds: tuple[int, ...]
    specs: tuple[ParamSpec, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in the layout's order."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def numel(self) -> int:
        """Real elements, padding not counted."""
        return sum(spec.numel for spec in self.specs)

    @abstractmethod
    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds of each parameter, in the layout's order, empty pieces left out."""

    @cached_property
    def num_ranks(self) -> int:
        """Ranks that share the range."""
        return len(self.bounds) - 1

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the whole range, padding included."""
        return self.bounds[-1]

    @cached_property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter, over all chunks."""
        return self.padded_numel - self.numel

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Elements of each rank's chunk, padding included."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def chunk(self, rank: int) -> tuple[int, int]:
        """First element of ``rank``'s chunk and one past its last."""
        return self.bounds[rank], self.bounds[rank + 1]


def stretches_in_buffer(layout: Layout) -> dict[str, list[tuple[int, int, int]]]:
    """Of each parameter the stretches of the gathered buffer: (start, stop, offset in the parameter)."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in layout.names}
    for rank in range(layout.num_ranks):
        for piece in layout.pieces(rank):
            known = found[piece.name]
            # Pieces come in rank order, so two that touch in the buffer follow each other in the parameter too.
            if known and known[-1][1] == piece.flat_start:
                start, _, offset = known.pop()
                known.append((start, piece.flat_stop, offset))
            else:
                known.append((piece.flat_start, piece.flat_stop, piece.param_start))
    return found
