"""Model states by the papers' formulas, from a number of parameters alone: bytes that ranks keep, and send.

Tests compare them with all that the ZeRO paper has published:

========  ==========  =========  ===============  =======================
strategy  parameters  gradients  optimizer state  elements sent per step
========  ==========  =========  ===============  =======================
ddp       bP          gP         KP               2P (N-1)/N
zero1     bP          gP         KP/N             2P (N-1)/N
zero2     bP          gP/N       KP/N             2P (N-1)/N
zero3     bP/N        gP/N       KP/N             3P (N-1)/N
========  ==========  =========  ===============  =======================

Bytes per element of everything that training keeps for a parameter:

==========  =========  ========  ======  ========  ========  =====================
name        parameter  gradient  master  momentum  variance  total per parameter
==========  =========  ========  ======  ========  ========  =====================
fp32        4          4         0       4         4         16
mixed       2          2         4       4         4         16, of which K = 12
mixed-8bit  2          2         4       1         1         10
pure-bf16   2          2         0       2         2         8
==========  =========  ========  ======  ========  ========  =====================

In mixed-8bit Adam's two moments have a byte each (Dettmers et al., arXiv 2110.02861; a number for each block of 2048 is
left out); in pure-bf16 nothing has more than 16 bits. Others are written as five numbers in the order of the columns,
such as 2+4+4+4+4, with gradients that are kept and sent in 32 bits. A gradient travels in as many bytes as it is kept
in, a gathered parameter in its own.

Legend: P parameters, N ranks, b and g bytes of a parameter and a gradient, K bytes of optimizer state per parameter
(master weight included). Without padding; bytes are whole numbers where P/N makes them so. Source: Rajbhandari et al.,
arXiv 1910.02054, section 3.1 (mixed-precision Adam), section 5 and figure 1 (memory), section 7 (communication: 2P and
3P elements, of which a ring of N ranks sends (N - 1)/N).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import product

from shardlab.partition.chunks import require_count
from shardlab.planner.rows import GRADIENTS, PARAMETERS, ROWS, STAGES, STATE, Row
from shardlab.vocabulary import MeshAxis

_NEEDED = ("parameter", "gradient")
_OF_THE_PAPER = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Precision:
    """Bytes per element; 0 where nothing is kept. ``master`` is the fp32 copy beside 16-bit parameters."""

    parameter: int
    gradient: int
    master: int
    momentum: int
    variance: int

    def __post_init__(self) -> None:
        """Parameters and gradients need at least a byte, the rest may be 0."""
        for field in fields(self):
            require_count(f"precision: {field.name}", getattr(self, field.name), int(field.name in _NEEDED))

    @property
    def optimizer(self) -> int:
        """Bytes per element that optimizer-state sharding divides: the ZeRO paper's K."""
        return self.master + self.momentum + self.variance

    @property
    def total(self) -> int:
        """Bytes of everything that training keeps for a parameter."""
        return self.parameter + self.gradient + self.optimizer


PRECISIONS = {
    "mixed": Precision(2, 2, 4, 4, 4), "fp32": Precision(4, 4, 0, 4, 4), "mixed-8bit": Precision(2, 2, 4, 1, 1),
    "pure-bf16": Precision(2, 2, 0, 2, 2),
}  # fmt: skip
_NUMBERS = re.compile(r"\d+(\+\d+){4}")


def precision_named(name: str, field: str = "precision") -> Precision:
    """The precision of this name, or of five numbers of bytes such as '2+4+4+4+4'.

    Args:
        name: the text.
        field: what it is called where it was given.

    Raises:
        ValueError: there is none; the message lists the allowed names.
    """
    if _NUMBERS.fullmatch(name):
        return Precision(*map(int, name.split("+")))
    if name not in PRECISIONS:
        raise ValueError(
            f"{field}: {name!r} is not one of {', '.join(PRECISIONS)}, or bytes of parameter, gradient, master "
            "weight, momentum and variance, such as 2+4+4+4+4"
        )
    return PRECISIONS[name]


@dataclass(frozen=True)
class ModelStates:
    """One strategy on one rank: bytes by kind, and the elements and bytes that it sends in a step."""

    strategy: str
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    total_bytes: float
    wire_elements: float
    wire_bytes: float


def model_states(num_params: float, num_ranks: int, precision: Precision | str = "mixed") -> tuple[ModelStates, ...]:
    """Bytes per rank for ddp, zero1, zero2, zero3, in this order.

    Args:
        num_params: parameters of the model, a whole number (7.5e9 will do).
        num_ranks: ranks that share it, 1 or more.
        precision: a name of ``PRECISIONS``, or bytes per element of your own.

    Raises:
        ValueError: a count that is too small or not whole, or an unknown precision; the message names the field.
    """
    if not (num_params >= 1 and float(num_params).is_integer()):
        raise ValueError(f"params: {num_params} is given; it must be a whole number of at least 1")
    require_count("ranks", num_ranks, 1)
    if isinstance(precision, str):
        precision = precision_named(precision)
    sizes = {MeshAxis.DATA: num_ranks}
    return tuple(states_of(name, ROWS[name], int(num_params), sizes, precision) for name in _OF_THE_PAPER)


def states_of(
    strategy: str, row: Row, num_params: int, sizes: Mapping[MeshAxis, int], precision: Precision
) -> ModelStates:
    """Those of one row over axes of these sizes, without checks."""
    itemsizes = {PARAMETERS: precision.parameter, GRADIENTS: precision.gradient, STATE: precision.optimizer}
    held = [Fraction(num_params * itemsize, row.parts(stage, sizes)) for stage, itemsize in itemsizes.items()]
    sent = [
        num_params * sum(row.sent(sizes, *each).values(), Fraction())
        for each in ((1, 1), (precision.parameter, precision.gradient))
    ]
    return ModelStates(strategy, *(as_number(value) for value in (*held, sum(held, Fraction()), *sent)))


def as_number(value: Fraction) -> float:
    """An int where it is a whole number."""
    return value.numerator if value.denominator == 1 else float(value)


@dataclass(frozen=True)
class OverHosts:
    """One row: bytes that a rank keeps, that it sends inside its host in a step, and that all of a host send out."""

    strategy: str
    rest_bytes: float
    inside_bytes: float
    across_bytes: float


def over_hosts(num_params: int, num_ranks: int, per_host: int, precision: Precision | str) -> tuple[OverHosts, ...]:
    """ddp and fsdp over all ranks as one axis, the sixteen rows over two (``engines.zero_in_groups``), and hpZ.

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
    return tuple(_over_hosts(num_params, num_ranks // per_host, per_host, each))


def _over_hosts(params: int, hosts: int, per_host: int, each: Precision) -> Iterator[OverHosts]:
    ranks, is_inside, is_across = hosts * per_host, per_host > 1, hosts > 1
    for name in ("ddp", "fsdp"):  # one ring through all hosts: each hop carries all
        flat = states_of(name, ROWS[name], params, {MeshAxis.DATA: ranks}, each)
        yield _row(flat, is_inside * flat.wire_bytes, is_across * flat.wire_bytes)
    sizes = {MeshAxis.REPLICA: hosts, MeshAxis.SHARD: per_host}
    for outer, inner in product((0, *STAGES), repeat=2):
        row = Row(inner, outer)
        sent = row.sent(sizes, each.parameter, each.gradient)
        kept = states_of(f"zero_{outer}x{inner}", row, params, sizes, each)
        yield _row(kept, params * sent[MeshAxis.SHARD], params * per_host * sent[MeshAxis.REPLICA])
    over_all, in_host = params * (ranks - 1) / ranks, params * (per_host - 1) / per_host
    once = over_all * (each.parameter + each.gradient)
    of_all = states_of("hpz", ROWS["fsdp"], params, {MeshAxis.DATA: ranks}, each)
    yield _row(of_all, is_inside * once + in_host * each.parameter, is_across * once)


def _row(kept: ModelStates, inside: float | Fraction, across: float | Fraction) -> OverHosts:
    return OverHosts(kept.strategy, float(kept.total_bytes), float(inside), float(across))
