"""How the parameters of a unit lie in the buffer that is gathered: the one thing flat and dim-0 sharding differ in."""

from typing import Protocol

from shardlab.partition.flat import Piece


class UnitLayout(Protocol):
    """What a unit asks of its layout: ``FlatLayout`` or ``Dim0Layout``."""

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
    row = 1
    for size in shape[1:]:
        row *= size
    return len(shape) > 1 and row > 0 and piece.param_start % row == 0 and piece.param_stop % row == 0


def stretches_of(layout: UnitLayout, names: list[str]) -> dict[str, list[tuple[int, int, int]]]:
    """Of each parameter the stretches of the gathered buffer: (start, stop, offset in the parameter)."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names}
    for rank in range(layout.num_ranks):
        for piece in layout.pieces(rank):
            stretches = found[piece.name]
            if stretches and stretches[-1][1] == piece.flat_start:
                start, _, at = stretches.pop()
                stretches.append((start, piece.flat_stop, at))
            else:
                stretches.append((piece.flat_start, piece.flat_stop, piece.param_start))
    return found
