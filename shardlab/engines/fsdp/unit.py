"""A wrapped module and the parameters that are gathered for it.

Parameters of one dtype that are all trainable, or all frozen, make one ``UnitBucket``. A module that mixes them has
several, so that frozen parameters are never reduce-scattered.
"""

from collections.abc import Callable, Sequence

from torch import nn

from shardlab.engines.fsdp.bucket import UnitBucket
from shardlab.engines.sharded_bucket import BucketState


class Unit:
    """A module that the wrap policy has chosen, or the root.

    Args:
        name: of the module, or 'root'.
        module: the one whose forward and backward need the parameters.
        buckets: its own, without those of units inside it.
    """

    def __init__(self, name: str, module: nn.Module, buckets: Sequence[UnitBucket]) -> None:
        self.name, self.module, self.buckets = name, module, tuple(buckets)
        self.params = tuple(param for bucket in self.buckets for param in bucket.params.values())

    @property
    def is_spread(self) -> bool:
        """Whether ranks hold different elements, so that gathering it communicates."""
        return any(not bucket.is_whole for bucket in self.buckets)

    @property
    def is_partly_frozen(self) -> bool:
        """Whether some of its parameters do not train now."""
        return not all(param.requires_grad for param in self.params)

    def start_unshard(self) -> bool:
        """Begin to gather, and return whether anything was left to gather."""
        was_sharded = any(bucket.state is BucketState.SHARDED for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.start_unshard()
        return was_sharded

    def unshard(self) -> None:
        """Gather the full parameters."""
        # The gathers of all buckets are issued before the first is waited for.
        self.start_unshard()
        for bucket in self.buckets:
            bucket.unshard()

    def reshard(self) -> None:
        """Free the full parameters, unless the user holds them."""
        for bucket in self.buckets:
            bucket.reshard()

    def drop_gather(self) -> None:
        """Drop a prefetch that was not used."""
        for bucket in self.buckets:
            if bucket.state is BucketState.GATHERING:
                bucket.reshard()

    def hold(self, *, by_hand: bool) -> None:
        """Set whether the user gathered it by hand, so that nothing reshards it."""
        for bucket in self.buckets:
            bucket.held_by_hand = by_hand

    def start_reduce(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Begin to reduce the gradients; buckets where none is due are skipped, such as frozen ones."""
        for bucket in self.buckets:
            if any(is_due(param) for param in bucket.params.values()):
                bucket.start_reduce()

    def advance_reduce(self) -> None:
        """Wait for what is being reduced, and begin the next axis if there is one."""
        for bucket in self.buckets:
            bucket.advance_reduce()

    def finish_reduce(self) -> None:
        """Wait for the means."""
        for bucket in self.buckets:
            bucket.finish_reduce()
