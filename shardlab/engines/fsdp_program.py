"""What a backward of FSDP does with which unit, in which order: one program on all ranks.

Forward writes a tape, on which backward's acts are read from the end. Where the forward of a unit ended, its backward
begins: it is gathered, and so are the next ones. Where its forward began, its backward is over: it is resharded, and
its gradients are sent. For a root and two blocks, with one unit gathered ahead:

    forward    root and block 0 begin, block 0 ends, block 1 begins, block 1 and root end
    backward   gather root, block 1 | block 0 | reduce-scatter block 1 | reduce-scatter block 0 | the root

The program is made when backward begins (of several forwards, when it comes to the output of each), and so is the same
on all ranks, whatever each of them uses; hooks only move a cursor in it. That is right because autograd runs nodes in
the reverse order of their creation: when it has come to an output, all that is younger is done, and a gradient that has
not come by then will not.
"""

from typing import NamedTuple

from shardlab.engines.unit import Unit


class Act(NamedTuple):
    """What backward does with a unit: gather it, where its forward ended; be over with it, where its forward began.

    Attributes:
        unit: with which.
        gathers: or else it is over: it is resharded, and its gradients may be sent.
    """

    unit: Unit
    gathers: bool


class Pass:
    """One forward of the whole model.

    Args:
        is_taped: whether a backward may come.
        reshards: units after their forward.

    Attributes:
        tape: what backward has to do, in the order of forward: an act that is over where a unit's forward began, an
            act that gathers where it ended.
        order: the units, in the order in which their forwards began.
        open: those whose forwards run now; one that calls itself more than once.
        untaped: of units through which no gradient comes, where on the tape their forwards would stand.
    """

    def __init__(self, *, is_taped: bool, reshards: bool) -> None:
        self.is_taped, self.reshards = is_taped, reshards
        self.tape: list[Act] = []
        self.order: list[Unit] = []
        self.open: list[Unit] = []
        self.untaped: dict[Unit, list[int]] = {}


class Program:
    """The acts of one backward: the tape of its forward, read from the end.

    Args:
        tape: of the forward.

    Attributes:
        acts: in the order of backward.
        next: the number of those that have been done, and so the place of the next.
        last: of each unit, where it is over for the last time: after several uses only then all gradients are there.
    """

    def __init__(self, tape: list[Act]) -> None:
        self.acts = tape[::-1]
        self.next = 0
        self.last = {act.unit: place for place, act in enumerate(self.acts) if not act.gathers}

    def until(self, place: int) -> int:
        """How many acts are due when backward comes to ``place`` of the tape: that one, and all behind it.

        What stands behind it forward did later, so backward has passed it. Of 6 acts place 5 is the first, 0 the last.
        """
        return len(self.acts) - place
