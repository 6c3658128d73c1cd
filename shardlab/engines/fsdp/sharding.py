"""The shardings of FSDP as rows of a table over mesh axes: not classes, only who gathers with whom."""

from typing import NamedTuple

from shardlab.vocabulary import MeshAxis


class Sharding(NamedTuple):
    """A row of the table.

    Attributes:
        shard_axis: over which parameters are sharded; None for not at all.
        replica_axis: over which shards are replicated; None for not at all.
        reshard_after_forward: whether full parameters are let go between forward and backward.
    """

    shard_axis: str | None
    replica_axis: str | None
    reshard_after_forward: bool


SHARDINGS = {
    "full_shard": Sharding(MeshAxis.DATA, None, True),
    "shard_grad_op": Sharding(MeshAxis.DATA, None, False),
    "no_shard": Sharding(None, MeshAxis.DATA, False),
    "hybrid_shard": Sharding(MeshAxis.SHARD, MeshAxis.REPLICA, True),
}
