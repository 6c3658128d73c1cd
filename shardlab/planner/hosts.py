"""What a rank keeps and a host sends where a model is divided inside hosts, across them, or both (``rows``).

``engines.zero_in_groups`` sends all this; tests compare it with the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from shardlab.partition.chunks import require_count
from shardlab.planner.formulas import ModelStates, Precision, precision_named, states_of
from shardlab.planner.rows import ROWS, STAGES, Row
from shardlab.vocabulary import MeshAxis


@dataclass(frozen=True)
class OverHosts:
    """One row: bytes that a rank keeps, that it sends inside its host in a step, and that all of a host send out."""

    strategy: str
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    rest_bytes: float
    inside_bytes: float
    across_bytes: float


def over_hosts(num_params: int, num_ranks: int, per_host: int, precision: Precision | str) -> tuple[OverHosts, ...]:
    """ddp and fsdp over all ranks as one axis, the sixteen rows over two, and hpZ.

    Args:
        num_params: parameters of the model.
        num_ranks: ranks of all hosts.
        per_host: ranks of each.
        precision: bytes an element, or their name.

    Raises:
        ValueError: ``per_host`` does not divide ``num_ranks``; an unknown precision.
    """
    require_count("per-host", per_host, 1)
    if num_ranks % per_host:
        raise ValueError(f"per-host: {per_host} ranks a host do not divide {num_ranks} ranks; hosts have equally many")
    each = precision_named(precision) if isinstance(precision, str) else precision
    return tuple(_rows(num_params, num_ranks // per_host, per_host, each))


def _rows(params: int, hosts: int, per_host: int, each: Precision) -> Iterator[OverHosts]:
    ranks = hosts * per_host
    for name in ("ddp", "fsdp"):  # one ring through all hosts: each hop carries all
        flat = states_of(name, ROWS[name], params, {MeshAxis.DATA: ranks}, each)
        yield _row(flat, flat.wire_bytes, flat.wire_bytes if hosts > 1 else 0)
    sizes = {MeshAxis.REPLICA: hosts, MeshAxis.SHARD: per_host}
    for outer, inner in product((0, *STAGES), repeat=2):
        row = Row(inner, outer)
        sent = row.sent(sizes, each.parameter, each.gradient)
        kept = states_of(f"zero_{outer}x{inner}", row, params, sizes, each)
        yield _row(kept, params * sent[MeshAxis.SHARD], params * per_host * sent[MeshAxis.REPLICA])
    over_all, in_host = params * (ranks - 1) / ranks, params * (per_host - 1) / per_host
    once = over_all * (each.parameter + each.gradient)
    of_all = states_of("hpz", ROWS["fsdp"], params, {MeshAxis.DATA: ranks}, each)
    yield _row(of_all, once + in_host * each.parameter, once if hosts > 1 else 0)


def _row(kept: ModelStates, inside: float | Fraction, across: float | Fraction) -> OverHosts:
    return OverHosts(
        kept.strategy, float(kept.parameter_bytes), float(kept.gradient_bytes), float(kept.optimizer_bytes),
        float(kept.total_bytes), float(inside), float(across),
    )  # fmt: skip
