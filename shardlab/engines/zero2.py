"""ZeRO-2: gradients are sharded too; only the parameters are whole on every rank.

What differs from ``zero1``: where the reduce-scatter puts the mean. A bucket's buffer is allocated when backward
reaches it and freed when its reduction has been waited for; what stays is this rank's chunk. No full-size gradient is
alive between backward and step, and during backward only those of the buckets being filled and of at most two being
reduced. (A parameter that this rank does not use holds back its bucket, and those behind it, until backward has ended.)

Per rank for P fp32 parameters with Adam: 4P parameters, 4P/N gradients, 8P/N state; P includes what pads each bucket
to a multiple of N. On the wire 2P(N-1)/N elements, as before. Inside ``no_sync()`` nothing is sent, so full gradients
accumulate there until a backward communicates. With ``precision='bf16'``: 2P parameters, 4P/N master weights,
4P/N gradients, 8P/N state; the paper's 2P + 14P/N keeps 16-bit gradients, but torch's optimizers need them in the
master weights' dtype. Source: Rajbhandari et al., arXiv 1910.02054, section 5.2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardlab.comm.events import Pending
from shardlab.engines.bucket import Bucket
from shardlab.engines.holdings import Holding
from shardlab.engines.zero1 import ZeRO1
from shardlab.vocabulary import Role

BUCKETS_IN_FLIGHT = 2


class ZeRO2(ZeRO1):
    """Replicated parameters, sharded gradients and optimizer state. Arguments as ``ZeRO1``."""

    name = "zero2"

    def reduce(self, bucket: Bucket) -> Pending:
        """As the base."""
        # A bound that does not depend on timing: behind a slow link all of the gradients would pile up.
        for earlier in self.buckets[: max(0, bucket.index - BUCKETS_IN_FLIGHT + 1)]:
            self.finish(earlier)
        return super().reduce(bucket)

    def new_chunk(self, place: Tensor) -> Tensor:
        """A tensor of its own."""
        return torch.empty_like(place)

    def take_means(self, bucket: Bucket) -> None:
        """As the base."""
        super().take_means(bucket)
        bucket.buffer = None  # the means are in the chunk: nothing refers to the buffer any more

    def drop(self) -> None:
        """As the base."""
        super().drop()
        for bucket in self.buckets:
            bucket.buffer = None  # what no_sync() has accumulated and no backward has sent

    def gradients_of(self, bucket: Bucket) -> Iterator[Holding]:
        """As the base."""
        if bucket.buffer is not None:
            yield Holding(Role.GRADIENT, bucket.buffer)
        if bucket.means is not None:
            yield Holding(Role.GRADIENT, bucket.means)
        for name, piece in bucket.tensors.own.items():
            if (gradient := self._pieces[name].grad) is not None:
                yield Holding(Role.GRADIENT, gradient, name, (piece.param_start, piece.param_stop))
