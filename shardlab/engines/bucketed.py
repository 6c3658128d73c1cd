"""Data parallel in buckets: gradients travel while backward still computes.

What differs from ``ddp``: parameters are grouped in reverse order into flat buckets (25 MiB by default), a bucket is
all-reduced as soon as its last gradient is there, and each ``param.grad`` is a view of its bucket, so no gradient is
copied back. Bytes per rank and elements on the wire are those of ``ddp``; the messages are few, large and early.
Source: Li et al., arXiv 2006.15704, section 3.2.

Buckets are sent in the same order on every rank, whatever order their gradients arrive in: a bucket waits for the ones
before it. A parameter that this rank did not use is sent as zeros when backward has ended.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardlab.comm.events import Pending
from shardlab.engines.bucket import Bucket
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.strategy import Given, LaidOut, Strategy, check_replaced
from shardlab.engines.tensor_layout import bucket_layouts
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.vocabulary import Role, class_of


class Bucketed(Strategy):
    """Replicated parameters; gradients are all-reduced bucket by bucket during backward.

    Args:
        bucket_bytes: capacity of a bucket in bytes.
    """

    name = "bucketed"

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    def lay_out(self, given: Given) -> LaidOut:
        """As the base."""
        super().lay_out(given)
        self.buckets = self.make_buckets(given)
        self._place = {
            param: (place, name) for place, one in enumerate(self.buckets) for name, param in one.params.items()
        }
        self._begin()
        divisions = [
            Division(one.layout, self.comm, next(iter(one.params.values())).element_size()) for one in self.buckets
        ]
        return LaidOut(self.params, divisions)

    def make_buckets(self, given: Given) -> list[Any]:
        """In the order in which they are sent."""
        layouts = bucket_layouts(self.params, 1, self.bucket_bytes, self.partition)
        return [
            Bucket(index, layout, {name: self.params[name] for name in layout.names}, 1 / self.num_ranks)
            for index, layout in enumerate(layouts)
        ]

    @contextlib.contextmanager
    def backward(self, *, sends: bool) -> Iterator[None]:
        """As the base."""
        self._begin()
        yield

    def _begin(self) -> None:
        """Expect a gradient of all that trains now, and send from the first bucket."""
        self._missing = {
            bucket: {param for param in bucket.params.values() if param.requires_grad} for bucket in self.buckets
        }
        self._num_sent = 0

    def took(self, param: nn.Parameter, *, sends: bool) -> None:
        """As the base."""
        place, name = self._place[param]
        bucket = self.buckets[place]
        if param.grad is None:
            return  # a hook of the user's has dropped it: sent as zeros when backward has ended
        if not sends:
            if bucket.adds_up:
                bucket.fill(name)
            return
        if place < self._num_sent:
            raise RuntimeError(
                f"gradient of {name!r}: it comes in parts, and the first part has already been "
                "sent; with reentrant activation checkpointing, write checkpoint(..., use_reentrant=False); where "
                "full_params() came between two forwards, call backward() for each"
            )
        self.arrived(bucket, name)
        self._missing[bucket].discard(param)
        # A complete bucket waits behind one that is not: another rank may complete them the other way round.
        while self._num_sent < len(self.buckets) and not self._missing[self.buckets[self._num_sent]]:
            self._send_next()

    def arrived(self, bucket: Any, name: str) -> None:
        """A gradient has come that will be sent: into the buffer, so that one parameter's alone is in memory twice."""
        bucket.fill(name)

    def _send_next(self) -> None:
        bucket = self.buckets[self._num_sent]
        self._num_sent += 1
        # Skip only what no rank has a gradient for: what has arrived on this rank must not decide.
        if any(map(self.is_due, bucket.params.values())):
            self.send(bucket)

    def send(self, bucket: Any) -> None:
        """Begin to reduce a bucket, whatever has come of it."""
        bucket.prepare()
        bucket.pending = self.reduce(bucket)
        if not isinstance(bucket.pending, Pending):
            raise ValueError(
                f"strategy: reduce() of {self.name!r} returned {class_of(bucket.pending)}; return the Pending that "
                "self.comm returned, or Pending() where nothing is left to wait for"
            )

    def reduce(self, bucket: Any) -> Pending:
        """Begin to reduce ``bucket.buffer``, gradients over the number of ranks. (ZeRO-1 asks ``scatter``.)"""
        return self.comm.all_reduce(bucket.buffer, tag=f"gradients of bucket {bucket.index}")

    def reduce_rest(self) -> None:
        """As the base."""
        # Send all before waiting for the first, so that their transfers overlap.
        while self._num_sent < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            self.finish(bucket)
        self._num_sent = 0  # the next backward, or a step without one, begins anew

    def finish(self, bucket: Any) -> None:
        """Wait for a bucket that is being reduced; give every parameter its mean, the view of its slot."""
        if bucket.pending is None:
            return
        # Waited for, and only then dropped: the handle keeps the buffer that is being written to.
        bucket.pending.wait()
        bucket.pending = None
        for name, view in bucket.slots(bucket.buffer).items():
            try:
                bucket.params[name].grad = view.data  # with a version of its own
            except RuntimeError:
                check_replaced(bucket.params[name], view, name)
                raise

    def drop(self) -> None:
        """As the base."""
        for bucket in self.buckets:
            bucket.drop()
        self._begin()

    def holdings(self) -> Iterator[Holding]:
        """As the base."""
        yield from super().holdings()
        yield from (Holding(Role.GRADIENT, bucket.buffer) for bucket in self.buckets if bucket.buffer is not None)
