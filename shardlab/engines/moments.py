"""When an engine asks its guards: they refuse what must not be, and remember what is right."""

from enum import IntEnum, auto


class Moment(IntEnum):
    """The moments of an engine's life, in the order in which they come. (An int, whose hash calls no Python.)"""

    MODEL = auto()  # before anything of the model is changed
    BUILT = auto()
    FORWARD = auto()
    FORWARDED = auto()
    BACKWARD = auto()
    BACKWARD_ENDED = auto()  # the gradients are this rank's own
    REDUCE = auto()
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
