"""When gradients may be sent, and in which order: the same on every rank, whatever order they arrive in.

A member of the queue (a bucket, or a unit of FSDP) is complete when every trainable parameter in it has a gradient. It
is sent when it and all members before it are complete and nothing more can be added to them in this backward; members
that this rank's backward did not reach are sent when the backward has ended. So all ranks send the same collectives,
even if they used different parameters. The order itself is that of the buckets (``partition/buckets.py``), or of FSDP's
gathers (``fsdp/order.py``).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import nn

from shardlab.engines.hooks import unrefused


class Reducible(Protocol):
    """What a queue needs of its members."""

    @property
    def params(self) -> Iterable[nn.Parameter]:
        """The parameters whose gradients are sent together."""


Member = TypeVar("Member", bound=Reducible)


class ReductionQueue(Generic[Member]):
    """Sends its members in one order, each once in a backward.

    Args:
        members: all of them.
        is_due: whether any rank may have a gradient of a parameter; a member without such a parameter is not sent.
        send: begins the reduction of a member.
        in_order: returns all members in the order in which they are sent, the same on every rank; None for the order of
            ``members``.
    """

    def __init__(
        self,
        members: Iterable[Member],
        is_due: Callable[[nn.Parameter], bool],
        send: Callable[[Member], None],
        in_order: Callable[[], Sequence[Member]] | None = None,
    ) -> None:
        self._members, self._is_due, self._send = tuple(members), is_due, send
        self._in_order = in_order or (lambda: self._members)
        self.reset()

    def reset(self) -> None:
        """Go back to before the backward, when everything is still to send."""
        self._to_send: deque[Member] | None = None
        self._missing: dict[Member, set[nn.Parameter]] = {}
        self._in_parts: set[Member] = set()
        self._sent: set[Member] = set()

    @unrefused
    def begin(self) -> None:
        """A backward begins: expect a gradient from every parameter that is trainable now."""
        # Start over in each backward: the previous one may have raised halfway, or sent nothing inside no_sync().
        self.reset()
        self._missing = {member: {param for param in member.params if param.requires_grad} for member in self._members}

    def is_sent(self, member: Member) -> bool:
        """Whether its reduction has begun, so that another gradient comes too late."""
        return member in self._sent

    def is_complete(self, member: Member) -> bool:
        """Whether all its gradients have arrived in this backward, at least in part."""
        return not self._missing[member]

    def comes_in_parts(self, member: Member) -> bool:
        """Whether some of it has come in part, so that more may be added before the backward ends."""
        return member in self._in_parts

    def note(self, member: Member, param: nn.Parameter, *, in_part: bool) -> None:
        """Note that a gradient has arrived.

        Args:
            member: the one that holds the parameter.
            param: whose gradient it is.
            in_part: more may be added to it before the backward ends, so ``member`` must not be sent until then.
        """
        self._missing[member].discard(param)
        if in_part:
            self._in_parts.add(member)

    def send_complete(self) -> None:
        """Send what is complete, up to the first member that is not."""
        left = self._left()
        # One that is complete waits behind one that is not: another rank may complete them the other way round, and
        # two ranks that send different collectives wait for each other for ever.
        while left and not self._missing[left[0]] and left[0] not in self._in_parts:
            self._send_next(left)

    def send_rest(self) -> None:
        """The backward has ended: send everything that has not been sent."""
        left = self._left()
        while left:
            self._send_next(left)

    def _left(self) -> deque[Member]:
        """What has not been sent, the next one first."""
        if self._to_send is None:
            # Asked only now: a rank that called no backward joins what the others send, and in their order.
            self._to_send = deque(self._in_order())
        return self._to_send

    def _send_next(self, left: deque[Member]) -> None:
        member = left.popleft()
        self._sent.add(member)
        # Skip only what no rank has a gradient for: what has arrived on this rank must not decide.
        if any(self._is_due(param) for param in member.params):
            self._send(member)
