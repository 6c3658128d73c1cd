"""Parameters that are gathered, resharded and reduced together, and where they are: the only one that writes it."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from torch import nn

from shardlab.engines.plain_mode import untraced
from shardlab.engines.sharded_params import Shards


class State(Enum):
    """Where the parameters and gradients of a unit are."""

    SHARDED = auto()
    GATHERING = auto()
    GATHERED = auto()
    REDUCING = auto()  # the parameters are sharded again, and the gradients are on their way


class Unit:
    """Parameters that are gathered, resharded and reduced together; the only one that writes their state.

    Args:
        name: of the module, or of the bucket.
        shards: by kind.
        module: for whose computation they are gathered.

    Attributes:
        is_undivided: whether every rank has all of it.
        state: which this object alone writes.
        num_holders: those who need it gathered; while there are any, ``reshard`` does nothing.
        is_as_stored: whether what is gathered has the dtype that is stepped, and not the one to compute in.
    """

    def __init__(self, name: str, shards: Sequence[Shards], module: nn.Module | None = None) -> None:
        self.name, self.shards, self.module = name, tuple(shards), module
        self.params = tuple(param for one in shards for param in one.params.values())
        self.is_undivided = all(one.is_undivided for one in shards)
        self.state = State.SHARDED
        self.num_holders, self.is_as_stored = 0, False

    @untraced
    def start(self, *, as_stored: bool = False) -> None:
        """Begin to gather, unless that has begun or gradients of it are on their way."""
        if self.state is State.SHARDED:
            for one in self.shards:
                one.start(as_stored=as_stored)
            self.state, self.is_as_stored = State.GATHERING, as_stored

    @untraced
    def gather(self, *, as_stored: bool = False) -> None:
        """Gather, after the means if gradients are being reduced, and let the parameters show their values."""
        if self.state is State.REDUCING:
            self.finish()
        if self.state is State.SHARDED:
            self.start(as_stored=as_stored)
        if self.state is State.GATHERING:
            for one in self.shards:
                one.show_gathered()
            self.state = State.GATHERED

    def reshard(self) -> None:
        """Free what is gathered, unless somebody holds it."""
        if self.state in (State.GATHERING, State.GATHERED) and not self.num_holders:
            self._reshard()

    @untraced
    def _reshard(self) -> None:
        self.state = State.SHARDED
        for one in self.shards:
            one.show_at_rest()

    def reduce(self, is_due: Callable[[nn.Parameter], bool], *, first_axis_only: bool = False) -> None:
        """Reshard, and begin to reduce the gradients of the kinds in which one is due; see ``Shards.reduce``."""
        self.reshard()  # first, so that the buffer does not come on top of the parameters
        due = [one for one in self.shards if any(map(is_due, one.params.values()))]
        for one in due:
            one.reduce(first_axis_only=first_axis_only)
        if due and self.state is State.SHARDED:
            self.state = State.REDUCING

    def advance(self) -> bool:
        """Of each kind wait for the sum under way, and begin that over the next axis; see ``Shards.advance``.

        Returns:
            Whether another sum is under way. After the last the means are there: at the pieces, or, where they are
            offloaded, on their way to the host.
        """
        left = [one.advance() for one in self.shards]  # of all, before it is asked whether any goes on
        if not any(left) and self.state is State.REDUCING:
            self.state = State.SHARDED
        return any(left)

    def finish(self) -> None:
        """Wait for all that is left to be summed; then the means are there."""
        while self.advance():
            pass

    def drop(self) -> None:
        """The gradients are cleared; what is gathered may wait for its backward."""
        for one in self.shards:
            one.drop()
        if self.state is State.REDUCING:
            self.state = State.SHARDED
