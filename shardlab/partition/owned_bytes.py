"""How even whole-parameter ownership is."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardlab.partition.chunks import ParamSpec
from shardlab.partition.owners import assign_owners
from shardlab.vocabulary import Partition


@dataclass(frozen=True)
class Ownership:
    """Who owns which whole parameter: ``owners[i]`` is the rank of ``specs[i]``."""

    specs: tuple[ParamSpec, ...]
    owners: tuple[int, ...]
    num_ranks: int

    @classmethod
    def assign(cls, specs: Sequence[ParamSpec], num_ranks: int, partition: Partition) -> "Ownership":
        """The ownership that :func:`assign_owners` chooses, with the same errors."""
        return cls(tuple(specs), assign_owners(specs, num_ranks, partition), num_ranks)

    @property
    def byte_fractions(self) -> tuple[float, ...]:
        """Fraction of all bytes (not of all parameters) that each rank owns; they add up to 1 unless there are none."""
        loads = [0] * self.num_ranks
        for spec, owner in zip(self.specs, self.owners, strict=True):
            loads[owner] += spec.num_bytes
        return tuple(load / (sum(loads) or 1) for load in loads)
