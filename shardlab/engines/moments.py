"""What an engine is in: the state of its gradients, which it alone writes, and the moments when it asks its guards.

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

from enum import Enum, IntEnum, auto


class GradientState(Enum):
    """What the gradients are."""

    NONE = auto()
    LOCAL = auto()
    MEANS = auto()
    MEANS_AND_LOCAL = auto()
    FAILED = auto()

    @property
    def with_local(self) -> "GradientState":
        """What they are from the beginning of a backward on, which adds this rank's own, until these are reduced."""
        has_means = self in (GradientState.MEANS, GradientState.MEANS_AND_LOCAL)
        return GradientState.MEANS_AND_LOCAL if has_means else GradientState.LOCAL


class Moment(IntEnum):
    """The moments of an engine's life, in the order in which they come. (An int, whose hash calls no Python.)"""

    MODEL = auto()  # before anything of the model is changed
    BUILT = auto()
    FORWARD = auto()
    FORWARDED = auto()
    BACKWARD = auto()
    BACKWARD_ENDED = auto()  # the gradients are this rank's own
    BACKWARD_SENDS = auto()  # likewise, and they are reduced at once
    REDUCE = auto()  # somebody needs means, and they are not
    MEANS = auto()  # they have been made, or changed by the engine
    MEANS_ALREADY = auto()  # somebody needs them, and nothing is to be reduced
    FAILED = auto()  # a backward has raised here
    STEP = auto()  # with means, before anything is stepped
    UPDATE = auto()  # the optimizer begins
    UPDATED = auto()
    STEPPED = auto()  # all ranks have the stepped parameters
    ZERO_GRAD = auto()
    FULL = auto()  # before parameters are shown whole
    FULL_LEFT = auto()
    SAVE = auto()
    LOAD = auto()
    LOADED = auto()
    INSTALL = auto()  # before the optimizer's state is replaced
    INSTALLED = auto()
    CLOSE = auto()
    CLOSED = auto()
