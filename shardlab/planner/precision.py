"""Bytes per element of everything that training keeps for a parameter.

=====  =========  ========  ======  ========  ========  =====================
name   parameter  gradient  master  momentum  variance  total per parameter
=====  =========  ========  ======  ========  ========  =====================
fp32   4          4         0       4         4         16
mixed  2          2         4       4         4         16, of which K = 12
=====  =========  ========  ======  ========  ========  =====================

Source of ``mixed``: Rajbhandari et al., arXiv 1910.02054, section 3.1 (mixed-precision Adam, K = 12).
"""

from dataclasses import dataclass, fields

from shardlab.partition.chunks import require_count


@dataclass(frozen=True)
class Precision:
    """Bytes per element; 0 where nothing is kept. ``master`` is the fp32 copy beside 16-bit parameters."""

    parameter: int
    gradient: int
    master: int
    momentum: int
    variance: int

    def __post_init__(self) -> None:
        """Parameters and gradients take room, the rest may take none."""
        for field in fields(self):
            require_count(f"precision: {field.name}", getattr(self, field.name), int(field.name in _NEEDED))

    @property
    def optimizer(self) -> int:
        """Bytes per element that optimizer-state sharding divides: the ZeRO paper's K."""
        return self.master + self.momentum + self.variance


ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_NEEDED = ("parameter", "gradient")
PRECISIONS = {"mixed": Precision(2, 2, 4, 4, 4), "fp32": Precision(4, 4, 0, 4, 4)}


def precision_named(name: str) -> Precision:
    """The precision of this name.

    Raises:
        ValueError: there is none; the message lists the allowed names.
    """
    if name not in PRECISIONS:
        raise ValueError(f"precision: {name!r} is not one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
