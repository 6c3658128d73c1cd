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
from typing_extensions import override

from shardlab.engines.buckets import Bucket
from shardlab.engines.holdings import Holding
from shardlab.engines.zero1 import ZeRO1
from shardlab.vocabulary import Role

BUCKETS_IN_FLIGHT = 2


class ZeRO2(ZeRO1):
    """Replicated parameters, sharded gradients and optimizer state. Arguments as ``ZeRO1``."""

    name = "zero2"

    @override
    def _send(self, bucket: Bucket) -> None:
        # A bound that does not depend on timing: behind a slow link all of the gradients would pile up.
        for earlier in self.buckets[: max(0, bucket.index - BUCKETS_IN_FLIGHT + 1)]:
            self._complete(earlier)
        super()._send(bucket)

    @override
    def _new_chunk(self, place: Tensor) -> Tensor:
        # A new one each time: the pieces' ``.grad`` is the chunk of an earlier backward, until that is added.
        return torch.empty_like(place)

    @override
    def _take_means(self, bucket: Bucket) -> None:
        super()._take_means(bucket)
        # The means are in the chunk: nothing refers to the buffer any more.
        bucket.free()

    @override
    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        for bucket in self.buckets:
            # A buffer that is still here has what no_sync() accumulated and no backward has sent.
            bucket.free()

    @override
    def _gradients_of(self, bucket: Bucket) -> Iterator[Holding]:
        if bucket.chunk is not None:
            yield Holding(Role.GRADIENT, bucket.chunk)
            for name, place in bucket.places_in_chunk.items():
                yield Holding(Role.GRADIENT, bucket.chunk[place], name, self.owned()[name])
