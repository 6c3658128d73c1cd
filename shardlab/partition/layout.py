"""What flat and dim-0 layouts have in common: how parameters lie in the buffer that is gathered, cut into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one rank's chunk.

    ``flat_start`` to ``flat_stop`` is its place in the flat range, ``param_start`` to ``param_stop`` its place in the
    flattened parameter; both have ``numel`` elements. ``whole`` says that the piece is the full parameter.
    """

    slot_index: int
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


class Layout(Protocol):
    """What an engine asks of a layout: ``FlatLayout`` or ``Dim0Layout``."""

    @property
    def names(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def num_ranks(self) -> int: ...  # noqa: D102
    @property
    def bounds(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def padded_numel(self) -> int: ...  # noqa: D102
    @property
    def padding_numel(self) -> int: ...  # noqa: D102
    def chunk(self, rank: int) -> tuple[int, int]: ...  # noqa: D102
    def pieces(self, rank: int) -> tuple[Piece, ...]: ...  # noqa: D102


def has_whole_rows(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Whether a piece of a parameter of this shape begins and ends between two rows of dim 0."""
    row = prod(shape[1:])
    return len(shape) > 1 and row > 0 and piece.param_start % row == 0 and piece.param_stop % row == 0


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


def first_elements(layout: Layout) -> Sequence[tuple[str, int]]:
    """Name and place in the buffer of the first element of each rank's pieces."""
    return [(piece.name, piece.flat_start) for rank in range(layout.num_ranks) for piece in layout.pieces(rank)]
