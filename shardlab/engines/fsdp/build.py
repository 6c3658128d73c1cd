"""From the parameters of a unit to its sharded buckets.

Parameters of a unit are in one bucket if they have one dtype, all train or none does, and all are sharded or all are
too small to be worth it (``replicate_below``): such a bucket is one chunk, which every rank holds.

With whole parameters (``partition``) the owners are chosen over the whole model and not unit by unit: else the same
ranks would own the largest parameter of every block.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import nn

from shardlab.comm import BaseMesh
from shardlab.comm.communicator import Communicator
from shardlab.engines.fsdp.bucket import UnitBucket
from shardlab.engines.fsdp.sharding import SHARDINGS
from shardlab.engines.offload import OFFLOADS
from shardlab.engines.placeholder import ParameterSites, sites_of
from shardlab.engines.precision import Precision
from shardlab.partition.dim0 import dim0_layout
from shardlab.partition.flat import ParamSpec, flat_layout, owned_layout, owned_order
from shardlab.partition.layout import Layout
from shardlab.partition.owners import Ownership
from shardlab.vocabulary import MeshAxis, Partition

LAYOUTS: Mapping[str, Callable[[list[ParamSpec], int], Layout]] = {"flat": flat_layout, "dim0": dim0_layout}


@dataclass(frozen=True)
class Builder:
    """The options of ``FSDP`` that a bucket is made of; checked."""

    mesh: BaseMesh
    sharding: str
    layout: str
    precision: Precision
    offload: str
    replicate_below: int
    partition: Partition = Partition.ELEMENTS

    def __post_init__(self) -> None:
        """Check every option that a user can get wrong."""
        for field, value, allowed in (
            ("sharding", self.sharding, SHARDINGS),
            ("layout", self.layout, LAYOUTS),
            ("offload", self.offload, OFFLOADS),
        ):
            if value not in allowed:
                raise ValueError(f"{field}: {value!r} is not one of {', '.join(allowed)}")
        if self.replicate_below < 0:
            raise ValueError(f"replicate_below: {self.replicate_below} elements is below 0")
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
        """The axes gradients are averaged over, outer first."""
        row = SHARDINGS[self.sharding]
        return tuple(self.mesh[axis] for axis in (row.replica_axis, row.shard_axis) if axis is not None)

    @property
    def shard_axis(self) -> Communicator | None:
        """The ranks of a shard group; None where nothing is sharded."""
        axis = SHARDINGS[self.sharding].shard_axis
        return None if axis is None else self.mesh[axis]

    def owners(self, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
        """The rank of the shard group that holds each parameter; none of those that are cut or replicated.

        Args:
            params: of the whole model, in its order; they may be on the meta device.
        """
        if self.shard_axis is None or self.partition is Partition.ELEMENTS:
            return {}
        specs = [_spec(name, param) for name, param in params.items() if self.is_sharded(param)]
        return Ownership.assign(specs, self.shard_axis.num_ranks, self.partition).table

    def buckets(
        self, unit: str, module: nn.Module, params: Mapping[str, nn.Parameter], owners: Mapping[str, int]
    ) -> list[UnitBucket]:
        """Shard the parameters of one unit, which is all that is ever there in full.

        Args:
            unit: its name.
            module: the whole module, in which the parameters are.
            params: full parameters by name.
            owners: see ``owners``.
        """
        sites = sites_of(module, params)
        kinds: dict[Hashable, dict[str, nn.Parameter]] = {}
        for name, param in params.items():
            kind = (param.dtype, param.device, param.requires_grad, self.is_sharded(param))
            kinds.setdefault(kind, {})[name] = param
        numbered = enumerate(kinds.values())
        return [self._bucket(_bucket_name(unit, place, len(kinds)), alike, sites, owners) for place, alike in numbered]

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Whether ranks hold different elements of it."""
        return self.shard_axis is not None and param.numel() >= self.replicate_below

    def _bucket(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        sites: Mapping[str, ParameterSites],
        owners: Mapping[str, int],
    ) -> UnitBucket:
        if self.shard_axis is not None and self.is_sharded(next(iter(params.values()))):
            comm, replicas = self.shard_axis, tuple(axis for axis in self.data_axes if axis is not self.shard_axis)
        else:
            comm, replicas = Communicator(None, None, (0,), 0, MeshAxis.SHARD), self.data_axes[::-1]
        specs = [_spec(key, param) for key, param in params.items()]
        ranks = [owners[spec.name] for spec in specs if spec.name in owners]
        if ranks:
            layout: Layout = owned_layout(specs, ranks, comm.num_ranks)
            params = {specs[place].name: params[specs[place].name] for place in owned_order(ranks)}
        else:
            layout = LAYOUTS[self.layout](specs, comm.num_ranks)
        return UnitBucket(
            name, params, sites, layout, comm, self.precision, replicas=replicas, offload=OFFLOADS[self.offload]
        )


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    return ParamSpec(name, tuple(param.shape), param.element_size())


def _bucket_name(unit: str, place: int, number: int) -> str:
    return unit if number == 1 else f"{unit} part {place}"
