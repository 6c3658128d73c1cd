"""In which order units compute, learnt from the last forward, so that the next ones can be gathered ahead.

A wrong guess costs a gather that nobody uses; it never changes a result. The order in which gradients are reduced must
be the same on every rank. The order of use need not be, but that of the gathers is, or they would not have met.
"""

from collections.abc import Sequence

from shardlab.engines.fsdp.group import Group


class Order:
    """Forward order of this pass, and what comes next in forward and in backward.

    Args:
        groups: in the module's order, the guess before the first forward.
        root: the group round all others, whose use spans theirs: it has no place among them.
    """

    def __init__(self, groups: Sequence[Group], root: Group | None) -> None:
        self._groups, self._root = groups, root
        self._guess = [group for group in groups if group is not root]
        self._place = 0  # in the guess, of the next group of this pass
        self._pass: list[Group] | None = None  # groups of this pass, where a backward may follow
        self._used: list[Group] = []  # groups of all passes since the last backward
        self._gathered: dict[Group, None] = {}  # in this order, by forwards since the last backward
        self._back = 0  # uses whose backward has begun

    def begin_pass(self, *, is_taped: bool) -> None:
        """A forward begins; ``is_taped``: a backward may follow."""
        self._place = 0
        self._pass = [] if is_taped else None
        if is_taped and self._back:
            self.forget()

    def end_pass(self) -> None:
        """A forward has ended; one that may be followed by a backward is the next guess."""
        if self._pass:
            self._guess = self._pass
        self._pass = None

    def forget(self) -> None:
        """No backward of the passes so far will come."""
        self._used, self._back = [], 0
        self._gathered.clear()

    def gathered_for_forward(self, group: Group) -> None:
        """Note that a gather has begun."""
        if group.is_spread:
            self._gathered.setdefault(group)

    def forward_of(self, group: Group, ahead: int) -> list[Group]:
        """Note that ``group`` computes forward; the next ``ahead`` groups, none where the guess was wrong."""
        if group is self._root:
            return self._guess[:ahead]
        if self._pass is not None:
            self._pass.append(group)
            self._used.append(group)
        if group not in self._guess[self._place :]:
            return []
        self._place = self._guess.index(group, self._place) + 1
        return self._guess[self._place : self._place + ahead]

    def backward_of(self, group: Group, ahead: int) -> list[Group]:
        """Note that ``group`` computes backward; the next ``ahead`` groups, which are the previous ones of forward."""
        if group is self._root:
            place = len(self._used) - self._back
            return self._used[max(0, place - ahead) : place][::-1]
        place = len(self._used) - 1 - self._back
        while place >= 0 and self._used[place] is not group:
            place -= 1
        if place < 0:  # another output of a group that backward has reached already
            return []
        self._back = len(self._used) - place
        return self._used[max(0, place - ahead) : place][::-1]

    def of_reduction(self) -> list[Group]:
        """All groups in the order in which gradients are reduced: last gathered first; the root last."""
        known = [group for group in self._gathered if group is not self._root]
        return known[::-1] + [
            group for group in reversed(self._groups) if group not in self._gathered or group is self._root
        ]
