"""Each strategy as a row: what the ranks of an axis divide, and when what is sent. All that travels follows from it.

A stage says what the ranks of an axis divide: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.

==========================  ============================  =====================================================
moment                      axes                          what is sent over each
==========================  ============================  =====================================================
before a pass               of stage 3                    all-gather of parameters
gradients are ready         all; the higher stage first,  reduce-scatter, which leaves 1/n of them; over an
                            inside a host where equal     axis of stage 0 all-reduce, which sends twice as much
after the optimizer's step  of stages 1 and 2             all-gather of what was stepped, the other way round
==========================  ============================  =====================================================

Source: Rajbhandari et al., arXiv 1910.02054, section 5; Zhang et al., arXiv 2205.00119, section 3 (two axes).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

from shardlab.vocabulary import Collective, MeshAxis, Sharding

STATE, GRADIENTS, PARAMETERS = STAGES = (1, 2, 3)
BEFORE_A_PASS, AFTER_THE_STEP = (PARAMETERS,), (STATE, GRADIENTS)


class Sent(NamedTuple):
    """A message: its verb, over which axis, and the share of the elements that its whole buffer has."""

    op: Collective
    axis: MeshAxis
    share: Fraction


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        stage: what ranks divide; of two axes, those of a host.
        outer: of two axes, what ranks of different hosts divide; None where all ranks are one axis.
        packs: whether gradients lie together in buffers, which leave as they are full, and not each on its own.
        by_unit: whether units are gathered and reduced one by one, as FSDP does; else parameters all at once.
        regathers: whether parameters are gathered before backward again.
        alone: whether it is one process.
    """

    stage: int = 0
    outer: int | None = None
    packs: bool = True
    by_unit: bool = False
    regathers: bool = True
    alone: bool = False

    @property
    def parameters(self) -> bool:
        """Whether a rank has chunks of parameters only."""
        return any(stage >= PARAMETERS for _, stage in self.axes)

    @property
    def gradients(self) -> bool:
        """Likewise of gradients."""
        return any(stage >= GRADIENTS for _, stage in self.axes)

    @property
    def state(self) -> bool:
        """Likewise of optimizer state."""
        return any(stage >= STATE for _, stage in self.axes)

    @property
    def keeps_all(self) -> bool:
        """Whether what is gathered is all there at once."""
        return self.parameters and not (self.by_unit and self.regathers)

    @property
    def axes(self) -> tuple[tuple[MeshAxis, int], ...]:
        """The axes with their stages, in the order in which gradients are summed."""
        if self.alone:
            return ()
        if self.outer is None:
            return ((MeshAxis.DATA, self.stage),)
        inside, across = (MeshAxis.SHARD, self.stage), (MeshAxis.REPLICA, self.outer)
        return (inside, across) if self.stage >= self.outer else (across, inside)

    def sizes(self, num_ranks: int, per_host: int = 1) -> dict[MeshAxis, int]:
        """Ranks of each axis of its mesh, outer first."""
        if self.outer is None:
            return {MeshAxis.DATA: num_ranks}
        return {MeshAxis.REPLICA: num_ranks // per_host, MeshAxis.SHARD: per_host}

    def parts(self, stage: int, sizes: Mapping[MeshAxis, int]) -> int:
        """How many ranks divide what is divided from a stage on."""
        return prod(sizes[axis] for axis, own in self.axes if own >= stage)

    def reduced(self, sizes: Mapping[MeshAxis, int]) -> Iterator[Sent]:
        """Messages of some gradients, each after the one before it."""
        left = Fraction(1)
        for axis, stage in self.axes:
            yield Sent(Collective.REDUCE_SCATTER if stage else Collective.ALL_REDUCE, axis, left)
            left /= sizes[axis] if stage else 1

    def gathered(self, when: Collection[int], sizes: Mapping[MeshAxis, int]) -> list[Sent]:
        """Messages of some parameters, each after the one before it: ``BEFORE_A_PASS`` or ``AFTER_THE_STEP``."""
        found = zip(self.axes, self.reduced(sizes), strict=True)
        return [Sent(Collective.ALL_GATHER, axis, one.share) for (axis, stage), one in found if stage in when][::-1]

    def sent(self, sizes: Mapping[MeshAxis, int], parameter: float, gradient: float) -> dict[MeshAxis, Fraction]:
        """What a rank sends by axis in a step of one micro-batch for each element, on a ring.

        Args:
            sizes: ranks by axis.
            parameter: bytes of an element in a gather.
            gradient: bytes of an element in a reduction.
        """
        gathers = self.gathered(BEFORE_A_PASS, sizes) * (2 if self.regathers else 1)
        found = dict.fromkeys(sizes, Fraction(0))
        for op, axis, share in (*gathers, *self.reduced(sizes), *self.gathered(AFTER_THE_STEP, sizes)):
            itemsize = Fraction(parameter if op == Collective.ALL_GATHER else gradient)
            rounds = 2 if op == Collective.ALL_REDUCE else 1
            found[axis] += rounds * itemsize * share * (sizes[axis] - 1) / sizes[axis]
        return found


ROWS: Mapping[str, Row] = {
    "single": Row(packs=False, alone=True),
    "ddp": Row(packs=False),
    "bucketed": Row(),
    "zero1": Row(STATE),
    "zero2": Row(GRADIENTS),
    "zero3": Row(PARAMETERS),
    "fsdp": Row(PARAMETERS, by_unit=True),
    "shard_grad_op": Row(PARAMETERS, by_unit=True, regathers=False),
    "hybrid_shard": Row(PARAMETERS, outer=0, by_unit=True),
    "no_shard": Row(by_unit=True),
}


def row_of(strategy: str, sharding: Sharding | str = Sharding.FULL_SHARD) -> Row:
    """The row of a strategy, which FSDP has for each of its shardings."""
    row = ROWS[strategy]
    return row if sharding == Sharding.FULL_SHARD or not row.by_unit else ROWS[str(sharding)]
