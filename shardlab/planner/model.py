"""A model as the planner needs it: its parameters in order, which of them train, the bytes of its buffers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardlab.partition.chunks import require_count
from shardlab.partition.flat import ParamSpec
from shardlab.partition.slices import slices_of
from shardlab.vocabulary import dtype_name

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_FLOATS = {2: "bfloat16", 4: "float32", 8: "float64"}


class ModuleLike(Protocol):
    """A ``torch.nn.Module``, or anything that lists parameters and modules as one does."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Name and parameter, tied weights once."""
        ...

    def named_modules(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Any]]:
        """Name and module."""
        ...

    def buffers(self) -> Iterable[Any]:
        """Buffers."""
        ...


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
    """Parameters in the module's order, tied weights once; of a tensor-parallel model, those that one rank holds."""

    params: tuple[PlannedParam, ...]
    buffer_bytes: int = 0
    tensor_ranks: int = 1

    def __post_init__(self) -> None:
        """Names must differ."""
        require_count("buffer_bytes", self.buffer_bytes, 0)
        require_count("tensor_ranks", self.tensor_ranks, 1)
        names = [param.spec.name for param in self.params]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"params: {', '.join(twice)} come twice; names must differ")

    @classmethod
    def of_specs(cls, specs: Sequence[ParamSpec]) -> "PlannedModel":
        """All parameters trainable and used, no buffers."""
        return cls(tuple(PlannedParam(spec) for spec in specs))

    @property
    def numel(self) -> int:
        """Elements of all parameters: the formulas' P."""
        return sum(param.spec.numel for param in self.params)


def described(module: ModuleLike, *, unused: Iterable[str] = ()) -> PlannedModel:
    """Name, shape, dtype and trainability of a module's parameters, and the bytes of its buffers.

    Args:
        module: a ``torch.nn.Module``; parameters on the meta device will do.
        unused: names of trainable parameters that no rank's loss depends on.
    """
    without_gradient = set(unused)
    slices = slices_of(module)
    params = tuple(
        PlannedParam(
            ParamSpec(name, tuple(param.shape), param.element_size()),
            trainable=bool(param.requires_grad),
            used=name not in without_gradient,
            dtype=dtype_name(param.dtype),
            sliced=name in slices,
        )
        for name, param in module.named_parameters()
    )
    tensor_ranks = max((found.num_ranks for found in slices.values()), default=1)
    return PlannedModel(params, sum(buffer.nbytes for buffer in module.buffers()), tensor_ranks)
