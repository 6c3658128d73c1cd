"""ZeRO of one stage inside groups of ranks, and of another across them: 16 rows of one table.

What differs from ``zero1``, ``zero2``, ``zero3``: the axes. A stage says what ranks of its axis divide: 0 nothing, 1
what is stepped (and its optimizer state), 2 the means of gradients too, 3 parameters too. What is divided over both
axes is cut twice, so that each rank of G groups of S ranks has 1/(G S) of it:

=============  =======================================  ==================================================
outer x inner  the same as                              elements across groups a step, G groups of S ranks
=============  =======================================  ==================================================
0 x 0          bucketed over both axes                  2 P (G-1)/G; so does any row with outer > inner, where
                                                        outer = 3 sends 3 P (G-1)/G
0 x 1, 0 x 2   ZeRO inside, data parallel across        2 P/S (G-1)/G
0 x 3          hybrid_shard of FSDP, MiCS               2 P/S (G-1)/G
1 x 2          ZeRO-2 inside, state over all ranks      2 P/S (G-1)/G
1 x 3          hybrid_shard, state over all ranks       2 P/S (G-1)/G
2 x 3          HFSDP by bucket, without partial sums    2 P/S (G-1)/G
k x k          zero-k over all ranks, axis by axis      2 P/S (G-1)/G; 3 x 3: 3 P/S (G-1)/G
=============  =======================================  ==================================================

Gradients are summed over the axis of the higher stage first (inside, where they are equal), and all-reduced over one of
stage 0; after the step what was stepped is gathered the other way round.
Source: Rajbhandari et al., arXiv 1910.02054, section 5; Zhang et al., MiCS, arXiv 2205.00119, section 3.
"""

from typing import Any

from shardlab.comm.communicator import Communicator
from shardlab.engines.sharded_params import Placements
from shardlab.engines.strategy import Given, Strategy
from shardlab.engines.zero1 import ZeRO1
from shardlab.engines.zero3 import ZeRO3
from shardlab.vocabulary import MeshAxis

STAGES = (0, 1, 2, 3)


def zero_in_groups(outer: int, inner: int, **options: Any) -> Strategy:
    """A row of the table, over the axes ``replica`` (outer) and ``shard`` (inner).

    Args:
        outer: stage across groups, 0 to 3.
        inner: stage inside a group, 0 to 3.
        options: of ``ZeRO3``, the same as of ``ZeRO1``.

    Raises:
        ValueError: there is no such stage.
    """
    for field, stage in (("outer", outer), ("inner", inner)):
        if stage not in STAGES:
            raise ValueError(f"{field}: {stage!r} is not one of {', '.join(map(str, STAGES))}")
    return (ShardedInGroups if 3 in (outer, inner) else ReplicatedInGroups)(outer, inner, **options)


class _InGroups(Strategy):
    axes = (MeshAxis.REPLICA, MeshAxis.SHARD)

    def __init__(self, outer: int, inner: int, **options: Any) -> None:
        super().__init__(**options)
        self.stages, self.name = (outer, inner), f"zero_{outer}x{inner}"  # type: ignore[misc]

    def divide(self, given: Given) -> tuple[Communicator, Placements]:
        """Over the axes that the stages cut; see the table."""
        # The inner axis first where stages are equal: it has the fast links, and leaves less for the other.
        by_axis = sorted(zip(self.stages[::-1], given.comms[::-1], strict=True), key=lambda one: -one[0])
        cut = [comm for stage, comm in by_axis if stage]
        if len(cut) == 2:
            comm = given.mesh.flatten(*(comm.axis for comm in given.comms))
        else:
            comm = cut[0] if cut else Communicator(None, None, (0,), 0, MeshAxis.SHARD)
        replicas = [comm for stage, comm in by_axis if not stage]
        rests_over, means_over = (sum(stage >= least for stage in self.stages) for least in (3, 2))
        return comm, Placements(self.precision, replicas, cut, rests_over, means_over)


class ReplicatedInGroups(_InGroups, ZeRO1):
    """Stages 0 to 2; every rank has all parameters."""


class ShardedInGroups(_InGroups, ZeRO3):
    """Stage 3 inside groups, across them, or both."""
