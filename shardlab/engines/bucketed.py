"""Data parallel in buckets: gradients travel while backward still computes.

What differs from ``ddp``: parameters are grouped in reverse order into flat buckets (25 MiB by default), a bucket is
all-reduced as soon as its last gradient is there and those before it have been sent, and each ``param.grad`` is a view
of its bucket, so no gradient is copied back. Bytes per rank and elements on the wire are those of ``ddp``; the messages
are few, large and early. Source: Li et al., arXiv 2006.15704, section 3.2.

When a bucket is sent is in ``in_buckets.py``; what is sent, and where the mean belongs, here.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from shardlab.comm.events import Pending
from shardlab.engines.gradient_buffer import GradientBuffer
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.in_buckets import InBuckets
from shardlab.engines.strategy import Given, LaidOut, check_replaced
from shardlab.partition.buckets import bucket_layouts
from shardlab.partition.flat import FlatLayout
from shardlab.vocabulary import Role


class Bucket(GradientBuffer):
    """Gradients that travel together; each mean is a view of the buffer.

    Args:
        index: of it among the buckets, which is the order of their collectives.
        params: by name, of which it takes those of the layout.
        layout: of one rank: which elements of the buffer each parameter has.
        num_ranks: N.

    Attributes:
        pending: of the collective under way.
    """

    fills_on_arrival = True  # so that one parameter's gradient alone is in memory twice
    pending: Pending | None = None

    def __init__(self, index: int, params: Mapping[str, nn.Parameter], layout: FlatLayout, num_ranks: int) -> None:
        # A gradient has the strides of its parameter if that is dense, as in torch, so that sums run in the same order.
        is_dense = torch.ops.aten.is_non_overlapping_and_dense
        strides = {name: params[name].stride() for name in layout.names if is_dense(params[name])}
        super().__init__(params, layout, 0, strides, scale=1 / num_ranks)
        self.index = index


class Bucketed(InBuckets[Bucket]):
    """Replicated parameters; gradients are all-reduced bucket by bucket during backward. Options as ``InBuckets``."""

    name = "bucketed"

    def lay_out(self, given: Given) -> LaidOut:
        """Parameters stay what they are; every rank has and steps all of them."""
        super().lay_out(given)
        divisions = [Division(one.layout, self.comm, one.sum_dtype.itemsize) for one in self.buckets]
        return LaidOut(self.params, divisions)

    def make_buckets(self, given: Given) -> list[Bucket]:
        """One buffer for each group of parameters, in the order in which backward makes their gradients."""
        layouts = bucket_layouts(self.params, 1, self.bucket_bytes, self.partition)
        return [Bucket(index, self.params, layout, self.num_ranks) for index, layout in enumerate(layouts)]

    def send(self, bucket: Bucket) -> None:
        """Fill the buffer with what is still at parameters, and begin to reduce it."""
        bucket.fill_all()
        bucket.pending = self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> Pending:
        """Begin to sum ``bucket.buffer`` over the ranks, in place.

        In it are this rank's gradients over the number of ranks, so that the sums are means. (In ZeRO-1 and ZeRO-2 a
        strategy of your own overrides ``scatter``; in those that gather parameters, neither.)
        """
        assert bucket.buffer is not None
        return self.comm.all_reduce(bucket.buffer, tag=f"gradients of bucket {bucket.index}")

    def finish(self, bucket: Bucket) -> None:
        """Wait for the sums; every parameter gets its mean, the view of its slot."""
        if bucket.pending is None:
            return
        # Waited for, and only then dropped: the handle keeps the buffer that is being written to.
        bucket.pending.wait()
        bucket.pending = None
        for name, param in bucket.params.items():
            mean = bucket.slots[name].data  # with a version of its own
            try:
                param.grad = mean
            except RuntimeError:
                check_replaced(param, mean, name)
                raise

    def holdings(self) -> Iterator[Holding]:
        """Parameters and gradients, and the buffers that these lie in."""
        yield from super().holdings()
        yield from (Holding(Role.GRADIENT, bucket.buffer) for bucket in self.buckets if bucket.buffer is not None)
