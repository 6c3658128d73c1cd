"""Memory of the model states from a number of parameters alone: the ZeRO paper's formulas.

========  ==========  =========  ===============  =======================
strategy  parameters  gradients  optimizer state  elements sent per step
========  ==========  =========  ===============  =======================
ddp       bP          gP         KP               2P (N-1)/N
zero1     bP          gP         KP/N             2P (N-1)/N
zero2     bP          gP/N       KP/N             2P (N-1)/N
zero3     bP/N        gP/N       KP/N             3P (N-1)/N
========  ==========  =========  ===============  =======================

Legend: P parameters, N ranks, b and g bytes of a parameter and a gradient, K bytes of optimizer state per parameter
(master weight included): 2, 2, 12 for mixed-precision Adam, 4, 4, 8 for fp32. Without padding; bytes are whole numbers
where P/N makes them so. Source: Rajbhandari et al., arXiv 1910.02054, section 5 and figure 1 (memory), section 7
(communication: 2P and 3P elements, of which a ring of N ranks sends (N - 1)/N).
"""

from dataclasses import dataclass
from fractions import Fraction

from shardlab.partition.chunks import require_count
from shardlab.planner.precision import Precision, precision_named

# strategy -> whether parameters, gradients and state are sharded, and how many times P travels in a step
_SHARDED = {
    "ddp": (False, False, False, 2),
    "zero1": (False, False, True, 2),
    "zero2": (False, True, True, 2),
    "zero3": (True, True, True, 3),
}


@dataclass(frozen=True)
class ModelStates:
    """One strategy on one rank: bytes by kind, and the elements it sends in a step."""

    strategy: str
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    total_bytes: float
    wire_elements: float


def model_states(num_params: float, num_ranks: int, precision: Precision | str = "mixed") -> tuple[ModelStates, ...]:
    """Bytes per rank for ddp, zero1, zero2, zero3, in this order.

    Args:
        num_params: parameters of the model, a whole number (7.5e9 will do).
        num_ranks: ranks that share it, 1 or more.
        precision: 'mixed', 'fp32' or bytes per element of your own.

    Raises:
        ValueError: a count that is too small or not whole, or an unknown precision; the message names the field.
    """
    if not (num_params >= 1 and float(num_params).is_integer()):
        raise ValueError(f"params must be a whole number of at least 1, got {num_params}")
    require_count("ranks", num_ranks, 1)
    if isinstance(precision, str):
        precision = precision_named(precision)
    return tuple(_states(strategy, int(num_params), num_ranks, precision) for strategy in _SHARDED)


def _states(strategy: str, num_params: int, num_ranks: int, precision: Precision) -> ModelStates:
    *sharded, volumes = _SHARDED[strategy]
    itemsizes = (precision.parameter, precision.gradient, precision.optimizer)
    held = [
        Fraction(num_params * itemsize, num_ranks if is_sharded else 1)
        for itemsize, is_sharded in zip(itemsizes, sharded, strict=True)
    ]
    sent = Fraction(volumes * num_params * (num_ranks - 1), num_ranks)
    return ModelStates(strategy, *(_number(value) for value in (*held, sum(held, Fraction()), sent)))


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)
