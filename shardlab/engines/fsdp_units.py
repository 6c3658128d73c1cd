"""How FSDP divides a model: the options, and the units made by them.

Shardings are rows of a table over mesh axes, not classes. Each unit is allocated, initialized and sharded before the
next. Parameters of a unit are of one kind if they have the same dtype and device, if all or none are trainable, and if
all or none are sharded. Those too small to be sharded (``replicate_below``) have a layout of one chunk.

With whole parameters (``partition``) the owners are chosen over the whole model and not unit by unit, or the same ranks
would own the largest parameter of every block.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from shardlab import vocabulary
from shardlab.comm.communicator import Communicator
from shardlab.engines.offload import OffloadedShards
from shardlab.engines.precision import Precision
from shardlab.engines.sharded_params import ByAddress, Placements, Shards
from shardlab.engines.strategy import Given
from shardlab.engines.unit import Unit
from shardlab.meta_device import InitFn, materialize
from shardlab.partition.chunks import Layout, ParamSpec, require_count
from shardlab.partition.dim0 import dim0_layout
from shardlab.partition.flat import aligned_first, flat_layout, owned_layout
from shardlab.partition.owners import owners_by_name
from shardlab.units.policy import ROOT, WrapPolicy, owners_of_parameters, wrapped_modules
from shardlab.vocabulary import MeshAxis, Offload, Partition

Params = Mapping[str, nn.Parameter]


class ShardingRow(NamedTuple):
    """A row of the table.

    Attributes:
        axes: those that gradients are averaged over, outer first.
        is_sharded: whether parameters are, over the last of these axes; else they are replicated over all.
        reshards_after_forward: whether full parameters are freed between forward and backward.
    """

    axes: tuple[MeshAxis, ...]
    is_sharded: bool
    reshards_after_forward: bool


SHARDINGS: Mapping[str, ShardingRow] = {
    vocabulary.Sharding.FULL_SHARD: ShardingRow((MeshAxis.DATA,), True, True),
    vocabulary.Sharding.SHARD_GRAD_OP: ShardingRow((MeshAxis.DATA,), True, False),
    vocabulary.Sharding.NO_SHARD: ShardingRow((MeshAxis.DATA,), False, False),
    vocabulary.Sharding.HYBRID_SHARD: ShardingRow((MeshAxis.REPLICA, MeshAxis.SHARD), True, True),
}

LAYOUTS: Mapping[str, Callable[[list[ParamSpec], int], Layout]] = {
    vocabulary.LayoutName.FLAT: flat_layout,
    vocabulary.LayoutName.DIM0: dim0_layout,
}


@dataclass(frozen=True)
class ShardingOptions:
    """The checked options of ``FSDP``; see there."""

    sharding: str
    wrap: WrapPolicy
    prefetch: int
    layout: str
    partition: Partition
    precision: Precision
    offload: str
    replicate_below: int
    init_fn: InitFn
    divides: str = "nothing"
    """Of hybrid_shard, what is divided over replicas too: nothing, 'state' (``hfsdp``) or 'parameters' (``hpz``)."""
    kept: Callable[..., Shards] | None = None
    """Makes shards of which the ranks of a host, its first argument, keep what was gathered (``hpz``)."""

    def __post_init__(self) -> None:
        """Check the values, and which of them go together."""
        require_count("prefetch", self.prefetch, 0)
        require_count("replicate_below", self.replicate_below, 0)
        for field, value, allowed in (
            ("sharding", self.sharding, SHARDINGS),
            ("layout", self.layout, LAYOUTS),
            ("offload", self.offload, tuple(Offload)),
        ):
            if value not in allowed:
                raise ValueError(f"{field}: {value!r} is not one of {', '.join(allowed)}")
        own = {"replicate_below": self.replicate_below > 0, "partition": self.partition is not Partition.ELEMENTS}
        for field in (field for field, is_set in own.items() if is_set and not self.row.is_sharded):
            raise ValueError(f"{field}: with sharding='no_shard' every rank has all parameters; leave it out")
        if self.partition is not Partition.ELEMENTS and self.layout == "dim0":
            raise ValueError(
                f"partition: {self.partition.value!r} gives ranks whole parameters, and layout='dim0' cuts each into "
                "rows; use layout='flat', or partition='elements'"
            )

    @property
    def row(self) -> ShardingRow:
        """Of ``sharding``, in the table."""
        return SHARDINGS[self.sharding]

    def is_sharded(self, param: Tensor) -> bool:
        """Whether ranks hold different elements of a parameter."""
        return self.row.is_sharded and param.numel() >= self.replicate_below


def build_units(given: Given, options: ShardingOptions, at: ByAddress) -> list[Unit]:
    """Shard a module unit by unit, so that no rank needs memory for more than one unit of a model on the meta device.

    Args:
        given: what the strategy got; parameters on the meta device are replaced.
        options: how to divide it.
        at: see ``Shards``.
    """
    wrapped = wrapped_modules(given.module, options.wrap)
    owners = _owners(given, options)
    units = []
    for name, members in owners_of_parameters(given.module, wrapped, given.params, ROOT).items():
        if members:
            # In the same order on every rank, since equalise communicates; sharding frees this unit before the next.
            if materialize(given.module, members, given.params, given.device, options.init_fn):
                given.equalise([given.params[member] for member in members])
            params = {member: given.params[member] for member in members}
            units.append(Unit(name, _shards(name, params, given, options, owners, at), wrapped.get(name, given.module)))
    return units


def _owners(given: Given, options: ShardingOptions) -> Mapping[str, int]:
    """The rank of the shard group that owns each parameter; without those that are cut or replicated."""
    if options.partition is Partition.ELEMENTS:
        return {}
    specs = [_spec(name, param) for name, param in given.params.items() if options.is_sharded(param)]
    ranks = prod(comm.num_ranks for comm in (given.comms if options.divides != "nothing" else given.comms[-1:]))
    return owners_by_name(specs, ranks, options.partition)


def _shards(
    unit: str, params: Params, given: Given, options: ShardingOptions, owners: Mapping[str, int], at: ByAddress,
) -> list[Shards]:  # fmt: skip
    """Those of one unit, by kind, in the module's order, which is the same on every rank."""
    kinds: dict[Hashable, dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        kind = (param.dtype, param.device, param.requires_grad, options.is_sharded(param))
        kinds.setdefault(kind, {})[name] = param
    made = []
    for place, alike in enumerate(kinds.values()):
        name = unit if len(kinds) == 1 else f"{unit} part {place}"
        comm, placements = _placements(next(iter(alike.values())), given, options)
        layout = _layout(alike, comm.num_ranks, options, owners)
        make: Callable[..., Shards] = Shards
        if options.offload != Offload.NONE:
            make = partial(OffloadedShards, options.offload == Offload.ALL)
        elif options.kept is not None and comm.num_ranks > 1:
            make = partial(options.kept, given.comms[-1])
        made.append(make(name, alike, layout, comm, placements, at))
    return made


def _placements(param: nn.Parameter, given: Given, options: ShardingOptions) -> tuple[Communicator, Placements]:
    """The ranks a parameter is divided over, and how its shards are stored and moved."""
    # Inner axis first, as gradients are summed: over the shard group, then replicas.
    inner_first, precision = given.comms[::-1], options.precision
    if not options.is_sharded(param):
        return Communicator(None, None, (0,), 0, MeshAxis.SHARD), Placements(precision, inner_first)
    if options.divides == "nothing":
        return given.comms[-1], Placements(precision, given.comms[:-1])
    over_all = given.mesh.flatten(*(comm.axis for comm in given.comms))
    is_state = options.divides == "state"
    return over_all, Placements(precision, axes=inner_first, rests_over=1) if is_state else Placements(precision)


def _layout(params: Params, num_ranks: int, options: ShardingOptions, owners: Mapping[str, int]) -> Layout:
    specs = aligned_first(_spec(name, param) for name, param in params.items())
    ranks = [owners[spec.name] for spec in specs if spec.name in owners]
    return owned_layout(specs, ranks, num_ranks) if ranks else LAYOUTS[options.layout](specs, num_ranks)


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    return ParamSpec(name, tuple(param.shape), param.element_size())
