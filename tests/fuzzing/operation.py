"""An operation: what a user does, done by an engine on every rank and by one process of plain torch.

It is plain data. ``ours`` and ``plain`` return what the user sees, under the same names, or None. ``plain`` is called
on every rank of the pool, ``ours`` before it, on those that take part. ``applies`` says whether it makes sense now,
from what all ranks know alike; else it is skipped.
"""

from dataclasses import dataclass
from typing import ClassVar

from tests.fuzzing.world import Seen, World


class Operation:
    """One thing a user does; a subclass is a frozen dataclass, and says what is special about it."""

    is_habit: ClassVar[bool] = False  # whether it is a habit of plain torch which an engine may refuse in any case
    peers: ClassVar[bool] = True  # whether torch's engines take part
    drops: ClassVar[bool] = False  # whether losses that wait are forgotten before
    settles: ClassVar[bool] = False  # whether afterwards gradients are means, see ``World.settle``
    # whether afterwards parameters have other values, of which losses that wait know nothing
    steps: ClassVar[bool] = False

    def __init_subclass__(cls, **of_its_kind: bool) -> None:
        for name, value in of_its_kind.items():
            setattr(cls, name, value)
        dataclass(frozen=True)(cls)

    def applies(self, world: World) -> bool:
        return True

    def takes_part(self, world: World) -> bool:
        return world.ours.is_member

    def prepare(self, world: World) -> None:
        """What all ranks of the pool do before, those that take no part too."""

    def ours(self, world: World) -> Seen | None:
        raise NotImplementedError

    def plain(self, world: World) -> Seen | None:
        """Of some operations one process knows nothing."""

    def after(self, world: World) -> None:
        """What is known now, when both have done it."""
        if self.settles or self.steps:
            world.settle()
        if self.steps:
            world.may_clash = not self.drops
