"""A flat layout: many parameters laid end to end as one range of elements, and that range cut into a chunk per rank.

This is the shape of a bucket under every strategy, unless FSDP cuts by rows (``dim0``): each rank keeps its own chunk,
and in a layout of one rank that is everything. Two cuts:

- ``flat_layout``: parameters one after another, equal chunks, padding at the end. A chunk border may run through a
  parameter, so a rank holds *pieces*; every collective has equal parts.
- ``owned_layout``: whole parameters, reordered so that the chunk of a rank is exactly what it owns. No padding, no cut
  parameter, but uneven chunks.

::

    flat_layout    | a a a a b b | b c c c c . |        owned_layout   | a a a a c c c c | b b b |
                     rank 0        rank 1                                rank 0            rank 1

Legend: all offsets are in elements; ``start`` is included, ``stop`` is not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd, prod

from shardlab.partition.chunks import Layout, Piece, even_bounds, require_count

ALIGNED_NUMEL = 8  # elements: 16 bytes in a dtype of two bytes, more in wider ones


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the arithmetic needs it: ``itemsize`` is bytes per element, shape ``()`` is a scalar."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        require_count(f"itemsize of {self.name!r}", self.itemsize, 1)

    @cached_property
    def numel(self) -> int:
        """Elements; 1 for a 0-d parameter."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Slot:
    """Where one whole parameter lies in the flat range."""

    spec: ParamSpec
    start: int

    @cached_property
    def stop(self) -> int:
        """One past the parameter's last element in the flat range."""
        return self.start + self.spec.numel


@dataclass(frozen=True)
class FlatLayout(Layout):
    """Parameters in ``slots``, end to end from element 0.

    Elements past the last slot are padding: they belong to no parameter. The layout says nothing of dtype; a bucket of
    mixed dtypes is the caller's mistake (``assign_buckets`` keeps them apart by ``keys``).
    """

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        """Assert that slots touch each other and bounds cover them: only our own constructors could break that."""
        stops = [0, *(slot.stop for slot in self.slots)]
        assert [slot.start for slot in self.slots] == stops[:-1], "slots leave a gap or overlap"
        assert len(self.bounds) > 1, "bounds need at least one rank"
        assert self.bounds[0] == 0, "bounds must start at 0"
        assert list(self.bounds) == sorted(self.bounds), "bounds must not fall"
        assert self.bounds[-1] >= stops[-1], "bounds must cover all slots"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in slot order."""
        return tuple(slot.spec.name for slot in self.slots)

    @cached_property
    def numel(self) -> int:
        """Real elements, padding not counted."""
        return self.slots[-1].stop if self.slots else 0

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds of each parameter: its chunk cut by every slot, in slot order, empty pieces left out.

        Raises:
            ValueError: ``rank`` is not one of the ranks.
        """
        chunk_start, chunk_stop = self.chunk(rank)
        found = []
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.start, chunk_start), min(slot.stop, chunk_stop)
            if start < stop:
                whole = stop - start == slot.spec.numel
                found.append(Piece(index, slot.spec.name, start, stop, start - slot.start, stop - slot.start, whole))
        return tuple(found)


def flat_layout(specs: Sequence[ParamSpec], num_ranks: int) -> FlatLayout:
    """Parameters in the given order, cut into equal chunks, padded at the end by fewer than ``num_ranks`` elements.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    slots = _end_to_end(specs)
    return FlatLayout(even_bounds(slots[-1].stop if slots else 0, num_ranks), slots)


def aligned_first(specs: Iterable[ParamSpec]) -> list[ParamSpec]:
    """The order in which parameters are laid end to end: first those whose size keeps the next one aligned.

    A kernel reads a tensor 16 bytes at a time only if it begins at a multiple of 16 bytes, and ``view_as_complex``
    takes none that begins at an odd element. One odd size in front would shift all that come behind it; at the end it
    shifts nothing, and costs no padding. So multiples of 8 elements come first, then those of 4 and of 2: each
    parameter begins at a multiple of what divides its own size. Sizes are taken in elements, as the same layout serves
    several dtypes; within each kind the order stays. Where a chunk begins is another matter: ceil(numel / N) elements,
    or what an owner has, need be no multiple of 16 bytes, and padding them would be sent.
    """
    return sorted(specs, key=lambda spec: -gcd(spec.numel, ALIGNED_NUMEL))


def owned_layout(specs: Sequence[ParamSpec], owners: Sequence[int], num_ranks: int) -> FlatLayout:
    """Whole parameters, reordered by (owner, original order): the chunk of a rank is exactly what it owns.

    Args:
        specs: the parameters.
        owners: rank of each parameter; a rank may own none.
        num_ranks: ranks that share the range.

    Raises:
        ValueError: ``owners`` has another length than ``specs``.
    """
    bounds = [0] * (num_ranks + 1)
    for spec, owner in zip(specs, owners, strict=True):
        bounds[owner + 1] += spec.numel
    order = sorted(range(len(specs)), key=owners.__getitem__)  # stable: of one rank in the original order
    return FlatLayout(tuple(accumulate(bounds)), _end_to_end([specs[index] for index in order]))


def _end_to_end(specs: Sequence[ParamSpec]) -> tuple[Slot, ...]:
    return tuple(map(Slot, specs, accumulate((spec.numel for spec in specs), initial=0)))
