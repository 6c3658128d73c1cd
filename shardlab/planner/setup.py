"""What is planned: a model and a strategy.

Of a model its parameters in order, which of them train, and the bytes of its buffers; of a strategy its options,
checked: those of the engines, plus what a training step does with them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.partition.chunks import ParamSpec, require_count
from shardlab.partition.slices import require_rank, slices_of
from shardlab.planner.formulas import Precision
from shardlab.planner.rows import ROWS, STATE, Row, row_of
from shardlab.vocabulary import LayoutName, MeshAxis, Offload, Partition, Sharding, dtype_name

STRATEGIES = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps for a tensor that it steps.

    Attributes:
        values_per_element: tensors of the parameter's shape and dtype.
        counter_bytes: of a step counter, which no formula counts as optimizer state.
        scalar_bytes: of other tensors of one element, such as NAdam's product of momenta.
        from_start: what of it the constructor makes, so for tensors without gradient or elements too; None for nothing.
    """

    values_per_element: int = 2
    counter_bytes: int = 4
    scalar_bytes: int = 0
    from_start: "Optimizer | None" = None


ADAM = Optimizer()
SGD_MOMENTUM = Optimizer(1, 0)
SGD = Optimizer(0, 0)


@dataclass(frozen=True)
class Setup:
    """A strategy, its ranks and its options; options that a strategy does not take are ignored.

    Attributes:
        strategy: single, ddp, bucketed, zero1, zero2, zero3 or fsdp.
        num_ranks: ranks of the mesh.
        bucket_bytes: capacity of a bucket in bytes.
        partition: how zero1, zero2, zero3 divide a bucket, and fsdp the parameters.
        units: fsdp: names of the parameters of each wrapped unit, by the unit's name, in the module's order. The
            parameters of no unit are the unit ``root``.
        layout: fsdp: flat or dim0.
        sharding: fsdp: see ``Sharding``.
        shard_group_size: fsdp, hybrid_shard: ranks that shard among themselves; divides ``num_ranks``.
        replicate_below: fsdp: parameters of fewer elements are replicated.
        offload: fsdp: what is in host memory: none, parameters or all.
        prefetch: fsdp: units gathered ahead of the one that computes, in backward.
        micro_batches: forwards and backwards a step; all but the last in ``no_sync()``.
        clip: whether gradients are clipped by their global norm.
        scales_loss: whether a gradient scaler asks all ranks for an overflow.
        broadcast_buffers: whether the first data rank's buffers are sent after each step.
        optimizer: what it keeps for every parameter, or for those that it has, by name.
        precision: bytes per element at rest, with a master copy beside 16-bit parameters as in the ZeRO paper; None for
            the parameters' own dtype throughout, which is how the engines keep them.
        compute_dtype: zero1, zero2, zero3, fsdp: what gathers carry, for example bfloat16, and of zero1 and zero2 the
            parameters, beside master weights; None for the parameters' own.
        reduce_dtype: zero1, zero2, zero3, fsdp: what reductions carry; None for ``compute_dtype``.
    """

    strategy: str
    num_ranks: int = 1
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    partition: Partition | str = Partition.ELEMENTS
    units: Mapping[str, Sequence[str]] = field(default_factory=dict)
    layout: LayoutName | str = LayoutName.FLAT
    sharding: Sharding | str = Sharding.FULL_SHARD
    shard_group_size: int | None = None
    replicate_below: int = 0
    offload: Offload | str = Offload.NONE
    prefetch: int = 1
    micro_batches: int = 1
    clip: bool = False
    scales_loss: bool = False
    broadcast_buffers: bool = False
    optimizer: Optimizer | Mapping[str, Optimizer] = ADAM
    precision: Precision | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        """Check every field that a user can get wrong."""
        allowed = {
            "strategy": STRATEGIES, "layout": tuple(LayoutName), "partition": tuple(Partition),
            "sharding": tuple(Sharding), "offload": tuple(Offload), "compute_dtype": (None, *ITEMSIZES),
            "reduce_dtype": (None, *ITEMSIZES),
        }  # fmt: skip
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}: {str(value)!r} is not one of {', '.join(filter(None, values))}")
        for name in ("num_ranks", "bucket_bytes", "micro_batches"):
            require_count(name, getattr(self, name), 1)
        require_count("prefetch", self.prefetch, 0)
        require_count("replicate_below", self.replicate_below, 0)
        if self.row.alone and self.num_ranks != 1:
            raise ValueError(f"num_ranks: {self.num_ranks} is given; 'single' trains in one process")
        shares_whole = self.row.by_unit and self.partition != Partition.ELEMENTS
        if shares_whole and (self.layout == LayoutName.DIM0 or self.sharding == Sharding.NO_SHARD):
            raise ValueError(
                f"partition: {str(self.partition)!r} gives ranks whole parameters; it goes with layout 'flat' and a "
                f"sharding that shards, not with {str(self.layout)!r} and {str(self.sharding)!r}"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        size = self.shard_group_size
        if not self.hybrid:
            if size is not None:
                raise ValueError(f"shard_group_size: {size} is given; only fsdp with hybrid_shard takes it")
            return
        if size is None or size < 1 or self.num_ranks % size:
            raise ValueError(f"shard_group_size: {size} is given; it must divide the {self.num_ranks} ranks")

    def kept_for(self, name: str) -> Optimizer:
        """What the optimizer keeps for a parameter; nothing if it does not have it."""
        return self.optimizer if isinstance(self.optimizer, Optimizer) else self.optimizer.get(name, SGD)

    def dtype_in_compute(self, stored: str) -> str:
        """Element type in forward of parameters that are stored in this one."""
        return self._cast(stored, self.compute_dtype)

    def dtype_in_reduction(self, stored: str) -> str:
        """Element type in which their gradients are summed over ranks."""
        return self._cast(stored, self.reduce_dtype or self.compute_dtype)

    def _cast(self, stored: str, dtype: str | None) -> str:
        # Parameters that are no floating-point numbers stay as they are.
        takes_one = ROWS[self.strategy].state
        return dtype if dtype is not None and takes_one and stored in ITEMSIZES else stored

    @property
    def row(self) -> Row:
        """What lives where."""
        return row_of(self.strategy, self.sharding)

    @property
    def hybrid(self) -> bool:
        """Whether ranks shard in groups and replicate across them."""
        return self.row.outer is not None

    @property
    def sizes(self) -> dict[MeshAxis, int]:
        """Ranks of each axis of the mesh, outer first."""
        return self.row.sizes(self.num_ranks, self.shard_group_size or 1)

    @property
    def num_shards(self) -> int:
        """Chunks that parameters, gradients or state are cut into."""
        return self.row.parts(STATE, self.sizes)

    def ranks_among(self, wanted: Sequence[int] | None) -> Sequence[int]:
        """The ranks that a table shall cover; None for all.

        Raises:
            ValueError: a rank that does not exist.
        """
        ranks = range(self.num_ranks) if wanted is None else wanted
        for rank in ranks:
            require_rank(rank, self.num_ranks)
        return ranks

    def shard_of(self, rank: int) -> int:
        """Which chunk ``rank`` holds: neighbours shard among themselves, as on ``Mesh({"replica": R, "shard": S})``."""
        return rank % self.num_shards


if TYPE_CHECKING:  # a plan needs no torch, which takes 1.5 s to import
    from torch import nn

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_FLOATS = {2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class PlannedParam:
    """One parameter. ``used``: some rank's loss depends on it, so that it has a gradient and is stepped.

    ``dtype`` is the element type as records spell it; by default the float of ``spec.itemsize`` bytes. ``sliced``: the
    spec's is one of the slices that tensor-parallel ranks hold.
    """

    spec: ParamSpec
    trainable: bool = True
    used: bool = True
    dtype: str = ""
    sliced: bool = False

    def __post_init__(self) -> None:
        """Name the dtype where none was given."""
        if not self.dtype:
            object.__setattr__(self, "dtype", _FLOATS.get(self.spec.itemsize, f"{self.spec.itemsize} bytes"))

    @property
    def stepped(self) -> bool:
        """Whether the optimizer steps it."""
        return self.trainable and self.used

    def with_itemsize(self, itemsize: int) -> "PlannedParam":
        """The same in a float of ``itemsize`` bytes."""
        return self if itemsize == self.spec.itemsize else replace(
            self, spec=replace(self.spec, itemsize=itemsize), dtype=""
        )  # fmt: skip


@dataclass(frozen=True)
class PlannedModel:
    """Parameters in the module's order, tied weights once; of a tensor-parallel model, those that one rank holds.

    ``buffers`` likewise: nobody trains them.
    """

    params: tuple[PlannedParam, ...]
    buffers: tuple[PlannedParam, ...] = ()
    tensor_ranks: int = 1

    def __post_init__(self) -> None:
        """Names must differ."""
        require_count("tensor_ranks", self.tensor_ranks, 1)
        names = [param.spec.name for param in self.params]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"params: {', '.join(twice)} come twice; names must differ")

    @classmethod
    def of_specs(cls, specs: Sequence[ParamSpec]) -> "PlannedModel":
        """All parameters trainable and used, no buffers."""
        return cls(tuple(PlannedParam(spec) for spec in specs))

    @property
    def buffer_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.spec.num_bytes for buffer in self.buffers)

    @property
    def numel(self) -> int:
        """Elements of all parameters: the formulas' P."""
        return sum(param.spec.numel for param in self.params)


def described(module: "nn.Module", *, unused: Iterable[str] = ()) -> PlannedModel:
    """Name, shape, dtype and trainability of a module's parameters, and its buffers.

    Args:
        module: a ``torch.nn.Module``; parameters on the meta device will do.
        unused: names of trainable parameters that no rank's loss depends on.
    """
    without_gradient = set(unused)
    slices = slices_of(module)
    params, buffers = (
        tuple(
            PlannedParam(
                ParamSpec(name, tuple(one.shape), one.element_size()), trainable=bool(one.requires_grad),
                used=name not in without_gradient, dtype=dtype_name(one.dtype), sliced=name in slices,
            )
            for name, one in tensors
        )
        for tensors in (module.named_parameters(), module.named_buffers())
    )  # fmt: skip
    tensor_ranks = max((found.num_ranks for found in slices.values()), default=1)
    return PlannedModel(params, buffers, tensor_ranks)
