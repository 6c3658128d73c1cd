"""Memory by the papers' formulas: model states from a number of parameters alone, and the activations of a layer.

Model states, with which tests compare all that the ZeRO paper has published:

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

Bytes of activations a transformer layer keeps for backward, in 16-bit training:

==================================  ===========================================
layer                               bytes per rank
==================================  ===========================================
whole                               s b h (34 + 5 a s / h)
tensor parallel                     s b h (10 + 24 / t + 5 a s / (h t))
tensor and sequence parallel        s b h (34 / t + 5 a s / (h t))
the same, inputs kept whole         s b h (4 + 30 / t + 5 a s / (h t))
==================================  ===========================================

The term 5 a s / h is the attention matrix with its softmax and dropout; selective recomputation, and attention in one
kernel that never stores it, drop it. Full recomputation keeps the layer's input only, 2 s b h. The fourth row is
sequence parallelism that gathers the inputs of attention and MLP once and keeps them, instead of gathering them again
in backward. Not counted, as in the paper: two numbers a token and LayerNorm.

Legend: s tokens of a sequence, b sequences, h hidden, a heads, t tensor-parallel ranks. Matrices and GELU inputs of 2
bytes an element, dropout masks of 1. Source: Korthikanti et al., arXiv 2205.05198, table 2.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction

from shardlab.partition.chunks import require_count
from shardlab.planner.rows import GRADIENTS, PARAMETERS, ROWS, STATE, Row
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
    return ModelStates(strategy, *(_number(value) for value in (*held, sum(held, Fraction()), *sent)))


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)


RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Layer:
    """Sizes of a transformer layer; its MLP is four times as wide as its residual."""

    hidden: int
    num_heads: int
    seq_len: int
    micro_batch: int

    def __post_init__(self) -> None:
        """All sizes must be 1 or more."""
        for field in ("hidden", "num_heads", "seq_len", "micro_batch"):
            require_count(field, getattr(self, field), 1)


def activation_bytes(
    layer: Layer, num_ranks: int = 1, *, sequence_parallel: bool = False, regather: bool = True, recompute: str =
    "none",
) -> float:  # fmt: skip
    """Bytes per layer and rank, a whole number where the sizes divide.

    Args:
        layer: its sizes.
        num_ranks: tensor-parallel ranks.
        sequence_parallel: whether LayerNorm, dropout and the residual are in parts too.
        regather: with ``sequence_parallel``: the inputs of attention and MLP are kept in parts and gathered again.
        recompute: 'none', 'selective' (the attention matrix) or 'full' (everything but the layer's input).

    Raises:
        ValueError: an unknown ``recompute``, or ``num_ranks`` below 1.
    """
    require_count("num_ranks", num_ranks, 1)
    if recompute not in RECOMPUTATIONS:
        raise ValueError(f"recompute: {recompute!r} is not one of {', '.join(RECOMPUTATIONS)}")
    sbh = layer.seq_len * layer.micro_batch * layer.hidden
    outside = Fraction(1, num_ranks if sequence_parallel else 1)  # what heads and features do not divide
    if recompute == "full":
        return _number(2 * sbh * outside)
    inputs = outside if regather else Fraction(1)
    factor = 6 * outside + 4 * inputs + Fraction(24, num_ranks)
    if recompute == "none":
        factor += Fraction(5 * layer.num_heads * layer.seq_len, layer.hidden * num_ranks)
    return _number(sbh * factor)
