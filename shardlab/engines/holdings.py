"""What a rank holds of the model: one list, and everything that is derived from it.

A strategy answers two questions: which tensors does this rank hold (``holdings()``), and how are the parameters divided
over ranks (``divisions()``, empty without buckets; a replicated bucket is a layout of one rank)? Ownership, padding
and the live tensors by role are derived from the answers here, in the same way for every strategy.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.partition.chunks import Layout
from shardlab.vocabulary import Role


class Holding(NamedTuple):
    """A tensor that this rank holds.

    Attributes:
        role: what it is for.
        tensor: the tensor itself, not a copy.
        name: the parameter it belongs to; empty if it belongs to several or to none, such as a flat buffer.
        span: elements (start, stop) of that parameter, flattened.
    """

    role: Role
    tensor: Tensor
    name: str = ""
    span: tuple[int, int] = (0, 0)


class Division(NamedTuple):
    """Parameters that are divided over ranks as one bucket.

    Attributes:
        layout: which rank has which elements; a layout of one rank means that every rank has all of them.
        comm: the ranks of the layout.
        element_size: bytes of an element at rest.
        chunks: which chunk of the layout each rank of ``comm`` has; none: each its own number.
    """

    layout: Layout
    comm: Communicator
    element_size: int
    chunks: Sequence[int] = ()

    @property
    def is_spread(self) -> bool:
        """Whether ranks have different elements."""
        return self.layout.num_ranks > 1

    def pieces_of(self, rank: int) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) that a rank has of each flattened parameter it has anything of."""
        pieces = self.layout.pieces(0 if not self.is_spread else self.chunks[rank] if self.chunks else rank)
        return {piece.name: (piece.param_start, piece.param_stop) for piece in pieces}
