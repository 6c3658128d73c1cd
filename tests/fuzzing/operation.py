"""An operation: what a user does, done by an engine on every rank and by one process of plain torch.

It is plain data. ``ours`` and ``plain`` return what the user sees, under the same names. ``plain`` is called on every
rank of the pool, ``ours`` before it, on those that take part. ``applies`` says whether it makes sense now, from what
all ranks know alike; else it is skipped.
"""

from dataclasses import dataclass
from typing import ClassVar

from tests.fuzzing.world import Seen, World


@dataclass(frozen=True)
class Operation:
    """One thing a user does.

    Attributes:
        is_habit: whether it is a habit of plain torch which an engine may refuse in any case.
        peers: whether torch's engines take part.
    """

    is_habit: ClassVar[bool] = False
    peers: ClassVar[bool] = True

    def applies(self, world: World) -> bool:
        """Whether it makes sense now, the same on all ranks."""
        return True

    def takes_part(self, world: World) -> bool:
        """Whether this rank does it."""
        return world.ours.is_member

    def prepare(self, world: World) -> None:
        """What all ranks of the pool do before, those that take no part too."""

    def ours(self, world: World) -> Seen:
        """The engine does it."""
        raise NotImplementedError

    def plain(self, world: World) -> Seen:
        """One process does it."""
        raise NotImplementedError

    def after(self, world: World) -> None:
        """What is known now, when both have done it."""
