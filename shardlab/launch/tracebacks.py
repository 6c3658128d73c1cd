"""The traceback of an error in a rank: whole, and with the frames of the user's own files alone."""

import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from shardlab.launch.messages import INSTALLED


class Texts(NamedTuple):
    """An error's traceback.

    Attributes:
        whole: every frame.
        of_user: only the frames of the user's own files and cells. If there are none, it is empty for a ValueError,
            whose message says what to change, and the same as ``whole`` for other errors, which are not the user's.
        num_left_out: frames that are only in ``whole``.
    """

    whole: str
    of_user: str
    num_left_out: int


def texts_of(error: BaseException, trace: TracebackType | None) -> Texts:
    """The traceback of ``error`` from the frame ``trace`` on, and of the errors it was raised from."""
    found = traceback.TracebackException(type(error), error, trace)
    whole, num_left_out = "".join(found.format()), 0
    if not any(map(is_users, found.stack)):
        return Texts(whole, "", len(found.stack)) if isinstance(error, ValueError) else Texts(whole, whole, 0)
    for part in _chain(found):
        own = list(filter(is_users, part.stack))
        num_left_out += len(part.stack) - len(own)
        part.stack = traceback.StackSummary.from_list(own)
    return Texts(whole, "".join(found.format()), num_left_out)


def is_users(frame: traceback.FrameSummary) -> bool:
    """Whether it is of a file that is not installed, or of a cell."""
    return not frame.filename.startswith((*INSTALLED, "<frozen "))


def _chain(found: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """The error, and the errors that it was raised from or while handling."""
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
