"""The state of an engine's gradients: one enum. Only the engine writes it.

====================  =============================================================  =====================
are                   when                                                           become
====================  =============================================================  =====================
none                  a backward                                                     means
none                  a backward inside ``no_sync()``                                local sums
local sums            a backward, ``step()``, clipping, ``finish_gradients()``       means
means                 a backward                                                     means, added up
means                 a backward inside ``no_sync()``                                means and local sums
means and local sums  as for local sums                                              means
any                   a backward that raises on some rank                            failed, on all ranks
any, also failed      ``zero_grad()``                                                none
====================  =============================================================  =====================
"""

from enum import Enum, auto


class Gradients(Enum):
    """What the gradients are."""

    NONE = auto()
    LOCAL = auto()
    MEANS = auto()
    MEANS_AND_LOCAL = auto()
    FAILED = auto()

    @property
    def are_local(self) -> bool:
        """Whether some are this rank's own sums, which are still to be reduced."""
        return self in (Gradients.LOCAL, Gradients.MEANS_AND_LOCAL)


AFTER_BACKWARD = {
    Gradients.NONE: Gradients.LOCAL,
    Gradients.LOCAL: Gradients.LOCAL,
    Gradients.MEANS: Gradients.MEANS_AND_LOCAL,
    Gradients.MEANS_AND_LOCAL: Gradients.MEANS_AND_LOCAL,
}
"""What they are when a backward has added this rank's own, and nothing has been reduced yet."""
