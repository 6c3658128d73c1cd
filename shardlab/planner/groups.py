"""Which parameters share a layout, a message and a buffer, by the engines' own arithmetic.

single, ddp: every parameter alone. bucketed, zero1, zero2, zero3: a bucket (``partition.buckets``). fsdp: a unit; one
that holds parameters of two dtypes, or frozen beside trainable ones, is a group per kind: ``UNIT part 0``, ``part 1``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlab.partition.buckets import plan_buckets
from shardlab.partition.chunks import Layout, ParamSpec, Piece
from shardlab.partition.dim0 import dim0_layout
from shardlab.partition.flat import aligned_first, flat_layout, owned_layout
from shardlab.partition.owners import owners_by_name
from shardlab.planner.setup import PlannedModel, PlannedParam, Setup
from shardlab.vocabulary import LayoutName, Partition

ROOT = "root"


@dataclass(frozen=True)
class Group:
    """Parameters of one dtype, all trainable or all frozen, in one layout.

    ``name`` appears in its tags; ``unit`` is the unit whose forward and backward need it, or a bucket's own name.
    """

    name: str
    unit: str
    layout: Layout
    params: Mapping[str, PlannedParam]

    @cached_property
    def trainable(self) -> bool:
        """Whether gradients are kept and sent for it."""
        return any(param.trainable for param in self.params.values())

    @property
    def used(self) -> bool:
        """Whether any of its parameters has a gradient of its own."""
        return any(param.stepped for param in self.params.values())

    @property
    def itemsize(self) -> int:
        """Bytes of an element of its parameters."""
        return next(iter(self.params.values())).spec.itemsize

    @property
    def dtype(self) -> str:
        """Element type of its parameters."""
        return next(iter(self.params.values())).dtype

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.layout.num_ranks == 1

    def stepped(self, shard: int) -> Iterator[Piece]:
        """The pieces that the optimizer steps on the rank that holds chunk ``shard``."""
        pieces = self.layout.pieces(0 if self.is_whole else shard)
        return (piece for piece in pieces if self.params[piece.name].stepped)


def groups_of(model: PlannedModel, setup: Setup) -> tuple[Group, ...]:
    """All groups; buckets in the order of their index, units root first, then in the module's order.

    Raises:
        ValueError: ``setup.units`` names an unknown parameter, or one twice.
    """
    params = model.params
    if setup.precision is not None:
        params = tuple(param.with_itemsize(setup.precision.parameter) for param in params)
    by_name = {param.spec.name: param for param in params}
    if setup.row.by_unit:
        return tuple(_units(by_name, setup))
    if not setup.row.packs:
        return tuple(Group(name, name, flat_layout([param.spec], 1), {name: param}) for name, param in by_name.items())
    return tuple(_buckets(by_name, setup))


def _buckets(by_name: Mapping[str, PlannedParam], setup: Setup) -> Iterator[Group]:
    specs = [param.spec for param in by_name.values()]
    keys = [_kind(param) for param in by_name.values()]
    partition = Partition(setup.partition) if setup.row.state else Partition.ELEMENTS
    layouts = plan_buckets(specs, keys, setup.num_shards, setup.bucket_bytes, partition)
    for index, layout in enumerate(layouts):
        names = layout.names
        yield Group(f"bucket {index}", f"bucket {index}", layout, {name: by_name[name] for name in names})


def _units(by_name: Mapping[str, PlannedParam], setup: Setup) -> Iterator[Group]:
    owners = _owners(by_name, setup)
    for unit, names in _with_root(by_name, setup).items():
        # By first use, as the engine numbers its parts: tags are compared with those of a record.
        alike: dict[tuple[str, bool, bool], list[ParamSpec]] = {}
        for param in map(by_name.__getitem__, names):
            alike.setdefault((*_kind(param), _is_small(param, setup)), []).append(param.spec)
        for part, ((*_, small), specs) in enumerate(alike.items()):
            together = aligned_first(specs)
            name = unit if len(alike) == 1 else f"{unit} part {part}"
            layout = _unit_layout(together, 1 if small else setup.num_shards, owners, setup)
            yield Group(name, unit, layout, {spec.name: by_name[spec.name] for spec in together})


def _owners(by_name: Mapping[str, PlannedParam], setup: Setup) -> dict[str, int]:
    """The owner of each parameter that is sharded whole, over the whole model."""
    if setup.num_shards == 1 or setup.partition == Partition.ELEMENTS:
        return {}
    specs = [param.spec for param in by_name.values() if not _is_small(param, setup)]
    return owners_by_name(specs, setup.num_shards, Partition(setup.partition))


def _unit_layout(specs: list[ParamSpec], chunks: int, owners: Mapping[str, int], setup: Setup) -> Layout:
    ranks = [owners[spec.name] for spec in specs if spec.name in owners]
    if ranks:
        return owned_layout(specs, ranks, chunks)
    return dim0_layout(specs, chunks) if setup.layout == LayoutName.DIM0 else flat_layout(specs, chunks)


def _with_root(by_name: Mapping[str, PlannedParam], setup: Setup) -> dict[str, Sequence[str]]:
    units = setup.units
    wrapped = [name for names in units.values() for name in names]
    if unknown := sorted(set(wrapped) - set(by_name)):
        raise ValueError(f"units: no parameter is called {', '.join(unknown)}; use the names of named_parameters()")
    if twice := sorted({name for name in wrapped if wrapped.count(name) > 1}):
        raise ValueError(f"units: {', '.join(twice)} is in more than one unit; name each parameter once")
    if ROOT in units:
        raise ValueError(f"units: {ROOT!r} is the name of the unit of all other parameters; use another")
    root = [name for name in by_name if name not in set(wrapped)]
    return {ROOT: root, **units}


def _is_small(param: PlannedParam, setup: Setup) -> bool:
    return param.spec.numel < setup.replicate_below


def _kind(param: PlannedParam) -> tuple[str, bool]:
    return param.dtype, param.trainable
