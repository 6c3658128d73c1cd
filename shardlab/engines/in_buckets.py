"""When a bucket of gradients is sent: what strategies have in common whose parameters are whole on every rank.

Buckets are sent in the same order on every rank, whatever order their gradients arrive in: a bucket waits for the ones
before it. A parameter that this rank did not use is sent as zeros when backward has ended.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from torch import nn

from shardlab.engines.gradient_buffer import GradientBuffer
from shardlab.engines.strategy import IN_PARTS, Given, LaidOut, Strategy
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES

B = TypeVar("B", bound=GradientBuffer)
"""Of ``bucketed`` a ``Bucket``; from ``zero1`` on a ``Shards``."""


class InBuckets(Strategy, Generic[B]):
    """Replicated parameters; gradients are reduced bucket by bucket during backward.

    Args:
        bucket_bytes: capacity of a bucket in bytes.
    """

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    def lay_out(self, given: Given) -> LaidOut:
        """Make the buckets, and note which parameter is in which."""
        laid_out = super().lay_out(given)
        self.buckets = self.make_buckets(given)
        self._bucket_of = {  # the number of a parameter's bucket, and its name
            id(param): (index, name) for index, one in enumerate(self.buckets) for name, param in one.params.items()
        }
        self._num_sent = 0
        return laid_out

    def make_buckets(self, given: Given) -> Sequence[B]:
        """In the order in which they are sent."""
        raise NotImplementedError

    @contextlib.contextmanager
    def in_backward(self, *, sends: bool) -> Iterator[None]:
        """Expect a gradient of all that trains now; none of the buckets has been sent."""
        # Of each bucket, whose gradients have not come.
        self._missing = [{id(param) for param in one.params.values() if param.requires_grad} for one in self.buckets]
        self._num_sent = 0
        yield

    def grad_ready(self, param: nn.Parameter, *, sends: bool) -> None:
        """A bucket is sent when its last gradient has come, unless one before it still waits."""
        index, name = self._bucket_of[id(param)]
        bucket = self.buckets[index]
        if param.grad is None:
            return  # a hook of the user's has dropped it: sent as zeros when backward has ended
        if not sends:
            if bucket.adds_up:
                bucket.fill(name)
            return
        if index < self._num_sent:
            raise RuntimeError(IN_PARTS.format(repr(name)))
        if bucket.fills_on_arrival:
            bucket.fill(name)
        self._missing[index].discard(id(param))
        # A complete bucket waits behind one that is not: another rank may complete them the other way round.
        while self._num_sent < len(self.buckets) and not self._missing[self._num_sent]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self._num_sent]
        self._num_sent += 1
        # Skip only what no rank has a gradient for: what has arrived on this rank must not decide.
        if any(map(self.is_due, bucket.params.values())):
            self.send(bucket)

    def send(self, bucket: B) -> None:
        """Begin to reduce a bucket, whatever has come of it."""
        raise NotImplementedError

    def make_means(self) -> None:
        """Send the buckets that still waited, and wait for all."""
        # Send all before waiting for the first, so that their transfers overlap.
        while self._num_sent < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            self.finish(bucket)
        self._num_sent = 0  # the next backward, or a step without one, begins anew

    def finish(self, bucket: B) -> None:
        """Wait for a bucket that is being reduced; means go where they belong."""
        raise NotImplementedError

    def drop(self) -> None:
        """The gradients are cleared: none of the buckets has been filled or sent."""
        for bucket in self.buckets:
            bucket.drop()
        self._num_sent = 0
