"""How even whole-parameter ownership is."""

from collections.abc import Sequence

from shardlab.partition.chunks import ParamSpec
from shardlab.partition.owners import assign_owners
from shardlab.vocabulary import Partition


def byte_fractions(specs: Sequence[ParamSpec], num_ranks: int, partition: Partition) -> tuple[float, ...]:
    """Fraction of all bytes (not of all parameters) that each rank owns, if :func:`assign_owners` chooses.

    They add up to 1 unless there are none. Errors are those of the choice.
    """
    loads = [0] * num_ranks
    for spec, owner in zip(specs, assign_owners(specs, num_ranks, partition), strict=True):
        loads[owner] += spec.num_bytes
    return tuple(load / (sum(loads) or 1) for load in loads)
