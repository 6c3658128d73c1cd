"""In which order units compute, learnt from the last forward, so that the next ones can be gathered ahead.

A wrong guess costs a gather that nobody uses; it never changes a result.
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
        self._root = root
        self._last = [group for group in groups if group is not root]
        self._now: list[Group] = []
        self._back = 0  # uses whose backward has begun

    def new_pass(self) -> None:
        """A forward begins after a backward: what was seen becomes the guess."""
        if self._now:
            self._last = self._now
        self._now, self._back = [], 0

    def forward_of(self, group: Group, ahead: int) -> list[Group]:
        """Note that ``group`` computes forward; the next ``ahead`` groups."""
        if group is not self._root:
            self._now.append(group)
        return self._last[len(self._now) : len(self._now) + ahead]

    def backward_of(self, group: Group, ahead: int) -> list[Group]:
        """Note that ``group`` computes backward; the next ``ahead`` groups, which are the previous ones of forward."""
        if group is self._root:
            place = len(self._now) - self._back
            return self._now[max(0, place - ahead) : place][::-1]
        place = len(self._now) - 1 - self._back
        while place >= 0 and self._now[place] is not group:
            place -= 1
        if place < 0:  # another output of a group that backward has reached already
            return []
        self._back = len(self._now) - place
        return self._now[max(0, place - ahead) : place][::-1]

    def reduction(self, groups: Sequence[Group]) -> list[Group]:
        """The order in which gradients are reduced, the same on every rank: last first use first, then the unused."""
        used = list(dict.fromkeys(self._now))
        return used[::-1] + [group for group in groups if group not in used]
