"""The order in which units compute, learned from the last forward, so that the next ones can be prefetched.

A wrong guess costs a gather that is not used; it never changes a result. The order in which gradients are reduced must
be the same on every rank. So it follows the gathers and not the uses: ranks may use units in different orders, but they
have gathered them in one order, or the gathers would not have matched.
"""

from collections.abc import Sequence

from shardlab.engines.fsdp.unit import Unit


class Order:
    """Forward order of this pass, and what comes next in forward and in backward.

    Args:
        units: in the module's order, the guess before the first forward.
        root: the unit around all others. Its use spans theirs, so it has no place among them.
    """

    def __init__(self, units: Sequence[Unit], root: Unit | None) -> None:
        self._units, self._root = units, root
        self._guess = [unit for unit in units if unit is not root]
        self._place = 0  # in the guess, of the next unit of this pass
        self._pass: list[Unit] | None = None  # units of this pass, if a backward may follow
        self._used: list[Unit] = []  # units of all passes since the last backward
        self._gathered: dict[Unit, None] = {}  # in this order, by forwards since the last backward
        self._back = 0  # uses whose backward has begun
        self._is_stale = False  # what is known of the passes so far

    def begin_pass(self, *, is_taped: bool) -> None:
        """A forward begins; ``is_taped``: a backward may follow."""
        self._place = 0
        self._pass = [] if is_taped else None
        # A backward has begun on the passes so far: they are over, and a new count begins.
        if is_taped and (self._back or self._is_stale):
            self._used, self._back, self._is_stale = [], 0, False
            self._gathered.clear()

    def end_pass(self) -> None:
        """A forward has ended; if a backward may follow it, it is the next guess."""
        # An evaluation, which is not taped, may stop early or go another way: it does not change the guess.
        if self._pass:
            self._guess = self._pass
        self._pass = None

    def forget(self) -> None:
        """At the next pass forget those so far; not before, since a loop may clear gradients before it goes back."""
        self._is_stale = True

    def gathered_for_forward(self, unit: Unit) -> None:
        """Note that a gather has begun."""
        if unit.is_spread:
            self._gathered.setdefault(unit)

    def forward_of(self, unit: Unit, ahead: int) -> list[Unit]:
        """Note that ``unit`` computes forward; return the next ``ahead`` units, none if the guess was wrong."""
        if unit is self._root:
            return self._guess[:ahead]
        if self._pass is not None:
            self._pass.append(unit)
            self._used.append(unit)
        if unit not in self._guess[self._place :]:
            return []
        self._place = self._guess.index(unit, self._place) + 1
        return self._guess[self._place : self._place + ahead]

    def backward_of(self, unit: Unit, ahead: int) -> list[Unit]:
        """Note that ``unit`` computes backward; return the next ``ahead`` units, the previous ones of forward."""
        if unit is self._root:
            place = len(self._used) - self._back
        elif (place := self._latest_use(unit)) < 0:  # another output of a unit that backward has already reached
            return []
        else:
            self._back = len(self._used) - place
        return self._used[max(0, place - ahead) : place][::-1]

    def passed_before(self, unit: Unit | None) -> list[Unit]:
        """Units that backward passes, and has not come to, before ``unit`` or its end (None); last ones first."""
        ends = len(self._used) - self._back
        if unit is None:
            return self._used[:ends][::-1]
        place = -1 if unit is self._root else self._latest_use(unit)
        return [] if place < 0 else self._used[place + 1 : ends][::-1]

    def _latest_use(self, unit: Unit) -> int:
        """The latest that backward has not passed, -1 without one: a unit that was used twice comes twice."""
        place = len(self._used) - 1 - self._back
        while place >= 0 and self._used[place] is not unit:
            place -= 1
        return place

    def of_reduction(self) -> list[Unit]:
        """All units in the order in which gradients are reduced: last gathered first; the root last."""
        # The root last, since its parameters may be used first in forward: it would hold up every unit behind it.
        known = [unit for unit in self._gathered if unit is not self._root]
        return known[::-1] + [
            unit for unit in reversed(self._units) if unit not in self._gathered or unit is self._root
        ]
