"""What a rank keeps and a host sends where a model is divided inside hosts, across them, or both.

A stage says what the ranks of an axis divide: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
Gradients are summed over the axis of the higher stage first (inside a host where they are equal): by a reduce-scatter,
which leaves 1/n of them, or over an axis of stage 0 by an all-reduce, which sends twice as much. What is stepped is
gathered after the step, the other way round; parameters of stage 3 before forward and before backward instead. A ring
of n ranks sends (n - 1)/n. ``engines.zero_in_groups`` sends all this; tests compare the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from shardlab.partition.chunks import require_count
from shardlab.planner.formulas import Precision, precision_named, states_of

STAGES = range(4)


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


def sent(outer: int, inner: int, hosts: int, per_host: int, precision: Precision) -> tuple[Fraction, Fraction]:
    """Bytes a parameter that a rank sends in a step, across hosts and inside its own.

    Args:
        outer: stage across hosts.
        inner: stage inside a host.
        hosts: number of hosts.
        per_host: ranks of each.
        precision: bytes an element.
    """
    axes = sorted((("inside", inner, per_host), ("across", outer, hosts)), key=lambda axis: -axis[1])
    left, found = Fraction(1), {"inside": Fraction(0), "across": Fraction(0)}
    for name, stage, size in axes:
        passed = left * (size - 1) / size
        if not stage:
            found[name] += 2 * passed * precision.gradient
            continue
        found[name] += passed * (precision.gradient + (2 if stage == max(STAGES) else 1) * precision.parameter)
        left /= size
    return found["across"], found["inside"]


def _rows(params: int, hosts: int, per_host: int, each: Precision) -> Iterator[OverHosts]:
    ranks = hosts * per_host
    kept: tuple[float, ...]
    for name, strategy in (("ddp", "ddp"), ("fsdp", "zero3")):  # one ring through all hosts: each hop carries all
        flat = states_of(strategy, params, ranks, each)
        kept = flat.parameter_bytes, flat.gradient_bytes, flat.optimizer_bytes
        yield _row(name, kept, flat.wire_bytes, flat.wire_bytes if hosts > 1 else 0)
    itemsizes = each.parameter, each.gradient, each.optimizer
    for outer, inner in product(STAGES, STAGES):
        across, inside = sent(outer, inner, hosts, per_host, each)
        parts = ((hosts if outer >= least else 1) * (per_host if inner >= least else 1) for least in (3, 2, 1))
        kept = tuple(params * itemsize / part for itemsize, part in zip(itemsizes, parts, strict=True))
        yield _row(f"zero_{outer}x{inner}", kept, params * float(inside), params * per_host * float(across))
    over_all, in_host = params * (ranks - 1) / ranks, params * (per_host - 1) / per_host
    once = over_all * (each.parameter + each.gradient)
    kept = tuple(params * itemsize / ranks for itemsize in itemsizes)
    yield _row("hpz", kept, once + in_host * each.parameter, once if hosts > 1 else 0)


def _row(name: str, kept: tuple[float, ...], inside: float, across: float) -> OverHosts:
    parameter, gradient, optimizer = map(float, kept)
    return OverHosts(name, parameter, gradient, optimizer, sum(kept), float(inside), float(across))
