"""From a plain module to the units of FSDP: each is allocated, initialized and sharded before the next.

Parameters of a unit share a bucket if they have the same dtype and device, if all or none are trainable, and if all or
none are sharded. Those too small to be sharded (``replicate_below``) are a bucket of one chunk, which every rank holds.

With whole parameters (``partition``) the owners are chosen over the whole model and not unit by unit, or the same ranks
would own the largest parameter of every block.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

from torch import Tensor, nn

from shardlab.comm import Communicator
from shardlab.engines.fsdp.sharding import LAYOUTS, ShardingOptions
from shardlab.engines.fsdp.unit import Unit, UnitBucket
from shardlab.engines.offload import OFFLOADS
from shardlab.engines.placeholder import sites_of
from shardlab.meta_device import InitFn, materialize
from shardlab.partition.chunks import Layout
from shardlab.partition.flat import ParamSpec, aligned_first, owned_layout
from shardlab.partition.owners import Ownership
from shardlab.units.policy import ROOT, owners_of_parameters, wrapped_modules
from shardlab.vocabulary import MeshAxis, Partition

Equalise = Callable[[list[Tensor], str], None]
Params = Mapping[str, nn.Parameter]


def build_units(
    module: nn.Module,
    params: dict[str, nn.Parameter],
    options: ShardingOptions,
    init_fn: InitFn,
    equalise: Equalise,
) -> list[Unit]:
    """Shard a module unit by unit, so that no rank needs memory for more than one unit of a model on the meta device.

    Args:
        module: the user's.
        params: by name; those on the meta device are replaced.
        options: how to divide it.
        init_fn: fills parameters that were on the meta device.
        equalise: called with tensors and a tag; makes them those of the first data rank.
    """
    wrapped = wrapped_modules(module, options.wrap)
    owners = _owners(params, options)
    units = []
    for name, members in owners_of_parameters(module, wrapped, params, ROOT).items():
        if members:
            # In the same order on every rank, since equalise communicates; sharding frees this unit before the next.
            if materialize(module, members, params, options.mesh.device, init_fn):
                equalise([params[member] for member in members], f"parameters of {name} from rank 0")
            buckets = _buckets(name, module, {member: params[member] for member in members}, options, owners)
            units.append(Unit(name, wrapped.get(name, module), buckets))
    return units


def _owners(params: Params, options: ShardingOptions) -> Mapping[str, int]:
    """The rank of the shard group that owns each parameter; without those that are cut or replicated."""
    if options.shard_axis is None or options.partition is Partition.ELEMENTS:
        return {}
    specs = [_spec(name, param) for name, param in params.items() if options.is_sharded(param)]
    return Ownership.assign(specs, options.shard_axis.num_ranks, options.partition).table


def _buckets(
    unit: str, module: nn.Module, params: Params, options: ShardingOptions, owners: Mapping[str, int]
) -> list[UnitBucket]:
    """The buckets of one unit, sharded."""
    sites = sites_of(module, params)
    kinds: dict[Hashable, dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        kind = (param.dtype, param.device, param.requires_grad, options.is_sharded(param))
        kinds.setdefault(kind, {})[name] = param
    buckets = []
    # In the module's order, which is the same on every rank: the gathers of a unit follow it.
    for place, alike in enumerate(kinds.values()):
        name = unit if len(kinds) == 1 else f"{unit} part {place}"
        comm, replicas = _axes(next(iter(alike.values())), options)
        layout = _layout(alike, comm.num_ranks, options, owners)
        slots = {key: alike[key] for key in layout.names}
        offload = OFFLOADS[options.offload]
        buckets.append(
            UnitBucket(name, slots, sites, layout, comm, options.precision, replicas=replicas, offload=offload)
        )
    return buckets


def _axes(param: nn.Parameter, options: ShardingOptions) -> tuple[Communicator, Sequence[Communicator]]:
    """The ranks a parameter is divided over, and the axes its shards are replicated over."""
    if options.shard_axis is not None and options.is_sharded(param):
        return options.shard_axis, [axis for axis in options.data_axes if axis is not options.shard_axis]
    # Whole on every rank. Inner axis first, as the gradients of shards are summed: over the shard group, then replicas.
    return Communicator(None, None, (0,), 0, MeshAxis.SHARD), options.data_axes[::-1]


def _layout(params: Params, num_ranks: int, options: ShardingOptions, owners: Mapping[str, int]) -> Layout:
    specs = aligned_first(_spec(name, param) for name, param in params.items())
    ranks = [owners[spec.name] for spec in specs if spec.name in owners]
    return owned_layout(specs, ranks, num_ranks) if ranks else LAYOUTS[options.layout](specs, num_ranks)


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    return ParamSpec(name, tuple(param.shape), param.element_size())
