"""The state of an engine's gradients: one enum. Only the engine writes it.

====================  ==========================================================  ====================
are                   when                                                        become
====================  ==========================================================  ====================
none                  a backward                                                  means
none                  a backward inside ``no_sync()``                             local sums
local sums            a backward inside ``no_sync()``                             local sums
local sums            a backward                                                  means
means                 a backward                                                  means, added up
means                 a backward inside ``no_sync()``                             means and local sums
means and local sums  a backward inside ``no_sync()``                             means and local sums
means and local sums  a backward                                                  means, added up
all but failed        ``step()``, clipping, ``finish_gradients()``                means
all but failed        ``zero_grad(set_to_none=False)``                            means, which are zeros
any                   a backward that raises on some rank                         failed, on all ranks
any, also failed      ``zero_grad()``                                             none
====================  ==========================================================  ====================

While a backward runs, inside ``no_sync()`` or not, they count as local (``with_local``); a backward that communicates
makes means of them at its end. Where they have failed, backwards, steps and clipping are refused.
"""

from enum import Enum, auto


class GradientState(Enum):
    """What the gradients are."""

    NONE = auto()
    LOCAL = auto()
    MEANS = auto()
    MEANS_AND_LOCAL = auto()
    FAILED = auto()

    @property
    def are_local(self) -> bool:
        """Whether some are this rank's own sums, which are still to be reduced."""
        return self in (GradientState.LOCAL, GradientState.MEANS_AND_LOCAL)

    @property
    def with_local(self) -> "GradientState":
        """What they are from the beginning of a backward on, which adds this rank's own, until these are reduced."""
        has_means = self in (GradientState.MEANS, GradientState.MEANS_AND_LOCAL)
        return GradientState.MEANS_AND_LOCAL if has_means else GradientState.LOCAL
