"""ZeRO-1: each rank steps 1/N of every bucket, and holds optimizer state for that part alone.

What differs from ``bucketed``: parameters lie in flat buffers of the same layout, a bucket is reduce-scattered instead
of all-reduced, the optimizer steps this rank's pieces of it, and after the step the buffers are all-gathered, in place
and without a copy. Per rank for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P/N state; P includes what
pads each bucket to a multiple of N. On the wire 2P(N-1)/N elements a step, as in an all-reduce, of which they are the
two halves. Gradients stay at the parameters until their bucket is complete, and are then copied together: one bucket is
in memory twice for a moment. With a ``precision`` the buffers are rounded, and a rank steps its chunk of each
unrounded: its master weights. Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import increment_version

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending, wait_all
from shardlab.engines.holdings import Holding
from shardlab.engines.in_buckets import InBuckets
from shardlab.engines.sharded_params import Shards
from shardlab.engines.strategy import Given, LaidOut
from shardlab.engines.zero import ZeRO


class ZeRO1(ZeRO, InBuckets[Shards]):
    """Replicated parameters; each rank steps its pieces of them. Options as ``ZeRO``."""

    name = "zero1"
    steps_pieces = True
    means_over: int | None = 0

    def lay_out(self, given: Given) -> LaidOut:
        """The parameters become views of flat buffers, and the optimizer steps this rank's pieces of them."""
        super().lay_out(given)
        self._num_full_blocks = 0  # full_params() blocks
        self.full_gathers = any(one.has_masters for one in self.buckets)
        pieces = {name: piece for one in self.buckets for name, piece in one.pieces.items()}
        return LaidOut({name: pieces[name] for name in self.params}, [one.division for one in self.buckets])

    def make_buckets(self, given: Given) -> list[Shards]:
        """Shards whose parameters are whole at rest, cut as ``divide`` says."""
        comm, placements = self.divide(given)
        # All parameters are at rest on every rank; and a bucket asks this strategy how its gradients are sent.
        return self.make_shards(comm, placements._replace(rests_over=0, scatter=self.scatter))

    def send(self, bucket: Shards) -> None:
        """``Shards.reduce`` fills the buffer, and calls ``scatter`` over the first axis."""
        bucket.reduce()

    def scatter(self, axis: Communicator, buffer: Tensor, chunk: Tensor, bounds: tuple[int, ...], tag: str) -> Pending:
        """Begin to sum ``buffer`` over the ranks and to put this rank's part, by ``bounds``, into ``chunk``.

        Called by the bucket: over the first axis in ``send``, over further ones in ``finish``. To be overridden by who
        sends otherwise. The bucket divides the sums by the number of ranks when they have come (``Shards.advance``).

        Args:
            axis: whose ranks.
            buffer: [padded_numel], or of a second axis what the first has left; in the dtype gradients are summed in.
                It may be written to.
            chunk: [bounds of this rank], in the same dtype; perhaps a view of ``buffer``.
            bounds: of each rank's part, num_ranks + 1 of them.
            tag: of the message.
        """
        return axis.reduce_scatter(buffer, chunk, bounds=bounds, tag=tag)

    def finish(self, bucket: Shards) -> None:
        """Wait for the sums; means, or parts of them, become the ``.grad`` of the pieces."""
        while bucket.advance():
            pass

    @contextlib.contextmanager
    def stepping(self, *, loads: bool = False) -> Iterator[None]:
        """Inside, pieces are stepped; at the end those of all ranks are gathered, in place."""
        try:
            yield
        finally:  # an optimizer that raised may have stepped first, and those of other ranks have
            # By what is due, which all ranks know: one that stepped nothing of a bucket must join its gather too.
            due = [one for one in self.buckets if loads or any(map(self.is_due, one.params.values()))]
            # All are issued, in the order of the buckets on every rank, before the first is waited for.
            wait_all([one.gather_stepped() for one in due])
            # The parameters were written through the buffers, unseen by autograd: with a new version it refuses a
            # backward that saved the old values, and without one it would compute with the new ones.
            for one in due:
                increment_version(tuple(one.params.values()))

    @contextlib.contextmanager
    def full(self, *, keep_changes: bool) -> Iterator[None]:
        """Where parameters are rounded, inside the master weights of all ranks are shown in their place."""
        rounded = [one for one in self.buckets if one.has_masters and not self._num_full_blocks]
        self._num_full_blocks += 1
        try:
            for one in rounded:
                one.start(as_stored=True)
                one.show_gathered()
            yield
            if keep_changes:  # every rank wrote the same, so nothing is sent
                for one in self.buckets:  # of all, before anything is written
                    one.check_replaced()
                for one in self.buckets:
                    one.write_back()
        finally:
            self._num_full_blocks -= 1
            if not self._num_full_blocks:  # by then another block may not keep what was put there by ``.data =``
                for one in self.buckets:
                    one.show_at_rest()

    def holdings(self) -> Iterator[Holding]:
        """What the buckets hold."""
        for one in self.buckets:
            yield from one.holdings()
