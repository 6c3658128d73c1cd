"""Bytes of activations a transformer layer keeps for backward, in 16-bit training.

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

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import nan

import pandas as pd

from shardlab.partition.chunks import require_count
from shardlab.tables import MEMORY
from shardlab.vocabulary import Phase, Role

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
    layer: Layer,
    num_ranks: int = 1,
    *,
    sequence_parallel: bool = False,
    regather: bool = True,
    recompute: str = "none",
) -> float:
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


def predicted_activations(
    layers: dict[str, Layer], num_ranks: int = 1, *, run: str = "tensor", **options: bool | str
) -> pd.DataFrame:
    """Table ``memory`` with ``source='predicted'``: a row per layer and tensor-parallel rank, ``where`` its name.

    Args:
        layers: sizes by name, for example of 'blocks.0'.
        num_ranks: tensor-parallel ranks.
        run: name of the run.
        options: of ``activation_bytes``.

    Raises:
        ValueError: see ``activation_bytes``; or bytes that are no whole number, where ranks do not divide the sizes.
    """
    return MEMORY.frame(list(_rows(layers, num_ranks, run, options)))


def _rows(
    layers: dict[str, Layer], num_ranks: int, run: str, options: dict[str, bool | str]
) -> Iterator[dict[str, object]]:
    for rank in range(num_ranks):
        for name, layer in layers.items():
            num_bytes = activation_bytes(layer, num_ranks, **options)  # type: ignore[arg-type]
            if num_bytes != int(num_bytes):
                raise ValueError(
                    f"num_ranks: {num_ranks} ranks do not divide the sizes of {name!r}, {layer}; use a number that "
                    "divides them"
                )
            yield {
                "run": run, "source": "predicted", "rank": rank, "step": 0, "time_us": nan, "phase": Phase.FORWARD,
                "where": name, "role": Role.ACTIVATION, "bytes": int(num_bytes), "allocated_bytes": pd.NA,
                "rounding_bytes": pd.NA, "fragmented_bytes": pd.NA, "reserved_bytes": pd.NA, "resident_bytes": pd.NA,
            }  # fmt: skip


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)
