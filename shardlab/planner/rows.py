"""Each strategy as a row: of which roles a rank has chunks only, and what travels.

The messages of a role follow from where it lives: gradients that all ranks need whole are all-reduced, others
reduce-scattered; parameters that are whole in between are gathered after the step, others before each pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.vocabulary import Sharding


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        parameters: whether a rank has chunks of them only; likewise ``gradients`` and ``state``.
        gathers: how often all parameters are gathered in a step of one micro-batch.
        packs: whether gradients lie together in buffers, and not each on its own.
        by_unit: whether units are gathered and reduced one by one, as FSDP does.
        in_hosts: whether chunks are those of a host, and replicated across hosts.
        alone: whether it is one process.
    """

    parameters: bool = False
    gradients: bool = False
    state: bool = False
    gathers: int = 0
    packs: bool = True
    by_unit: bool = False
    in_hosts: bool = False
    alone: bool = False

    @property
    def reductions(self) -> int:
        """How often all gradients travel: an all-reduce sends twice what a reduce-scatter does."""
        return 1 if self.state else 2

    @property
    def keeps_all(self) -> bool:
        """Whether what is gathered is all there at once."""
        return self.parameters and not (self.by_unit and self.gathers > 1)


ROWS: Mapping[str, Row] = {
    "single": Row(packs=False, alone=True),
    "ddp": Row(packs=False),
    "bucketed": Row(),
    "zero1": Row(state=True, gathers=1),
    "zero2": Row(gradients=True, state=True, gathers=1),
    "zero3": Row(parameters=True, gradients=True, state=True, gathers=2),
    "fsdp": Row(parameters=True, gradients=True, state=True, gathers=2, by_unit=True),
    "shard_grad_op": Row(parameters=True, gradients=True, state=True, gathers=1, by_unit=True),
    "hybrid_shard": Row(parameters=True, gradients=True, state=True, gathers=2, by_unit=True, in_hosts=True),
    "no_shard": Row(by_unit=True),
}


def row_of(strategy: str, sharding: Sharding | str = Sharding.FULL_SHARD) -> Row:
    """The row of a strategy, which FSDP has for each of its shardings."""
    row = ROWS[strategy]
    return row if sharding == Sharding.FULL_SHARD or not row.by_unit else ROWS[str(sharding)]
