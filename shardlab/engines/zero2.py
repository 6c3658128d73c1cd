"""ZeRO-2: gradients are sharded too; only the parameters are whole on every rank.

What differs from ``zero1``: where the reduce-scatter puts the mean. A bucket's buffer is allocated when the last of its
gradients has come, and freed when its reduction has been waited for; what stays is this rank's chunk. No full-size
gradient is alive between backward and step, and during backward only those of buckets that are not complete and of at
most two being reduced. (A parameter that this rank does not use holds back its bucket, and those behind it, until
backward has ended.)

Per rank for P fp32 parameters with Adam: 4P parameters, 4P/N gradients, 8P/N state; P includes what pads each bucket
to a multiple of N. On the wire 2P(N-1)/N elements, as before. Inside ``no_sync()`` nothing is sent, so full gradients
accumulate there until a backward communicates. With ``precision='bf16'``: 2P parameters, 4P/N master weights,
4P/N gradients, 8P/N state; the paper's 2P + 14P/N keeps 16-bit gradients, but torch's optimizers need them in the
master weights' dtype. Source: Rajbhandari et al., arXiv 1910.02054, section 5.2.
"""

from shardlab.engines.sharded_params import Shards
from shardlab.engines.zero1 import ZeRO1

BUCKETS_IN_FLIGHT = 2


class ZeRO2(ZeRO1):
    """Replicated parameters, sharded gradients and optimizer state. Options as ``ZeRO``."""

    name = "zero2"
    means_over = None

    def send(self, bucket: Shards) -> None:
        """As ``ZeRO1``, after the sums of all but the last two buckets are there."""
        # A bound that does not depend on timing: behind a slow link all of the gradients would pile up.
        for earlier in self.buckets[: max(0, self._num_sent - BUCKETS_IN_FLIGHT)]:
            self.finish(earlier)
        super().send(bucket)
