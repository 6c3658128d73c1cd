"""How FSDP divides a model: shardings are rows of a table over mesh axes, not classes; with the other options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardlab import vocabulary
from shardlab.comm import BaseMesh, Communicator
from shardlab.engines.offload import OFFLOADS
from shardlab.engines.precision import Precision
from shardlab.partition.chunks import Layout
from shardlab.partition.dim0 import dim0_layout
from shardlab.partition.flat import ParamSpec, flat_layout
from shardlab.units.policy import WrapPolicy
from shardlab.vocabulary import MeshAxis, Partition


class Sharding(NamedTuple):
    """A row of the table.

    Attributes:
        shard_axis: the axis to shard parameters over; None if they are not sharded.
        replica_axis: the axis to replicate shards over; None if they are not replicated.
        reshard_after_forward: whether full parameters are freed between forward and backward.
    """

    shard_axis: str | None
    replica_axis: str | None
    reshard_after_forward: bool


SHARDINGS: Mapping[str, Sharding] = {
    vocabulary.Sharding.FULL_SHARD: Sharding(MeshAxis.DATA, None, True),
    vocabulary.Sharding.SHARD_GRAD_OP: Sharding(MeshAxis.DATA, None, False),
    vocabulary.Sharding.NO_SHARD: Sharding(None, MeshAxis.DATA, False),
    vocabulary.Sharding.HYBRID_SHARD: Sharding(MeshAxis.SHARD, MeshAxis.REPLICA, True),
}

LAYOUTS: Mapping[str, Callable[[list[ParamSpec], int], Layout]] = {
    vocabulary.LayoutName.FLAT: flat_layout,
    vocabulary.LayoutName.DIM0: dim0_layout,
}


@dataclass(frozen=True)
class ShardingOptions:
    """The checked options of ``FSDP`` that say how parameters are divided.

    Attributes:
        mesh: with the axes that ``sharding`` names.
        sharding: see ``FSDP``, as for all others.
        wrap: which modules are units.
        layout: how a parameter is cut.
        partition: whether it is cut at all.
        precision: dtypes.
        offload: what stays in host memory.
        replicate_below: parameters with fewer elements are not sharded.
    """

    mesh: BaseMesh
    sharding: str
    wrap: WrapPolicy
    layout: str
    partition: Partition
    precision: Precision
    offload: str
    replicate_below: int

    def __post_init__(self) -> None:
        """Check the values, and which of them go together."""
        for field, value, allowed in (
            ("sharding", self.sharding, SHARDINGS),
            ("layout", self.layout, LAYOUTS),
            ("offload", self.offload, OFFLOADS),
        ):
            if value not in allowed:
                raise ValueError(f"{field}: {value!r} is not one of {', '.join(allowed)}")
        if self.replicate_below < 0:
            raise ValueError(f"replicate_below: {self.replicate_below} elements is below 0; 0 shards all parameters")
        if self.replicate_below and self.sharding == "no_shard":
            raise ValueError("replicate_below: with sharding='no_shard' every parameter is replicated; leave it out")
        if self.partition is not Partition.ELEMENTS and self.sharding == "no_shard":
            raise ValueError("partition: with sharding='no_shard' every rank has all parameters; leave it out")
        if self.partition is not Partition.ELEMENTS and self.layout == "dim0":
            raise ValueError(
                f"partition: {self.partition.value!r} gives ranks whole parameters, and layout='dim0' cuts each into "
                "rows; use layout='flat', or partition='elements'"
            )

    @property
    def data_axes(self) -> tuple[Communicator, ...]:
        """The axes that gradients are averaged over, outer first."""
        row = SHARDINGS[self.sharding]
        return tuple(self.mesh[axis] for axis in (row.replica_axis, row.shard_axis) if axis is not None)

    @property
    def shard_axis(self) -> Communicator | None:
        """The ranks of a shard group; None if nothing is sharded."""
        axis = SHARDINGS[self.sharding].shard_axis
        return None if axis is None else self.mesh[axis]

    @property
    def reshard_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        return SHARDINGS[self.sharding].reshard_after_forward

    def is_sharded(self, param: Tensor) -> bool:
        """Whether ranks hold different elements of a parameter."""
        return self.shard_axis is not None and param.numel() >= self.replicate_below
