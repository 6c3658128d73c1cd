"""The errors of ranks as the caller gets them: which rank, which error, and that rank's own traceback.

The message has the frames of the user's own files, since most errors are in a model, a loss or data. With
``SHARDLAB_TRACEBACK=full`` in the environment it has all of them.
"""

import os
import signal
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from shardlab.launch.messages import INSTALLED, Failure, Texts

SHOWS_ALL = ("SHARDLAB_TRACEBACK", "full")  # of the environment
READ = "How to read it: notebooks/guide/when_it_breaks.md"


class RankError(RuntimeError):
    """A function raised in a rank. ``__cause__`` is the original exception where it could be sent.

    Attributes:
        rank: the first rank that failed.
        exception_type: name of the exception's class.
        traceback_text: the traceback as that rank saw it, with all frames.
    """

    def __init__(self, failure: Failure, difference: str = "") -> None:
        self.rank, self.exception_type = failure.rank, failure.exception_type
        self.traceback_text, of_user, num_left_out = failure.texts
        first_line = f"rank {self.rank} raised {self.exception_type}"
        first_line += (f": {failure.summary}" if failure.summary else "") + (f". {difference}" if difference else "")
        name, value = SHOWS_ALL
        shown = self.traceback_text
        if num_left_out and os.environ.get(name) != value:
            shown = f"{of_user}({num_left_out} frames of libraries are left out; {name}={value} shows them)"
        super().__init__(f"{first_line}\n\nTraceback of rank {self.rank}:\n{shown}".rstrip())

    def __reduce__(self) -> tuple[Any, ...]:  # by itself pickle would call __init__ with the message
        return _as_it_is, (type(self), self.args), self.__dict__

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a cell: the lines that led here and the message, without the frames of the pool."""
        own = filter(is_users, traceback.extract_tb(self.__traceback__))
        return [*(line.rstrip() for line in traceback.format_list(list(own))), f"{type(self).__name__}: {self}"]


class RankDied(RankError):  # noqa: N818 - the word says it: there was no exception
    """A rank's process ended without an answer.

    Attributes:
        exit_code: its exit status; the negative number of the signal that killed it.
        table: the board at that moment, what every rank was in.
    """

    def __init__(self, rank: int, exit_code: int | None, table: str, difference: str = "") -> None:
        self.rank, self.exception_type, self.traceback_text = rank, type(self).__name__, ""
        self.exit_code, self.table = exit_code, table
        first_line = f"rank {rank} died: {describe_exit(exit_code)}" + (f". {difference}" if difference else "")
        RuntimeError.__init__(self, f"{first_line}\n\nWhat each rank was in:\n{table}\n\n{READ}")


class RankHang(RuntimeError):  # noqa: N818 - as above
    """Ranks waited in a collective for longer than the pool's ``timeout_s``.

    Attributes:
        waiting: ranks that wait.
        table: the board at that moment.
    """

    def __init__(self, summary: str, waiting: tuple[int, ...], table: str) -> None:
        self.waiting = waiting
        self.table = table
        super().__init__(f"{summary}\n\n{table}\n\n{READ}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (type(self), self.args), self.__dict__


def _as_it_is(made: type[RuntimeError], args: tuple[str, ...]) -> RuntimeError:
    return made.__new__(made, *args)


def describe_exit(exit_code: int | None) -> str:
    """An exit status in words: ``killed by SIGKILL ...`` or ``exit code 3``."""
    if exit_code is None:
        return "its process is gone"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if name == "SIGKILL":
        return "killed by SIGKILL (if nobody sent it: the kernel's out-of-memory killer does; try a smaller model)"
    return f"killed by {name}"


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
    """The error, the errors of its group, and those that it was raised from or while handling."""
    while found is not None:
        yield found
        for part in found.exceptions or ():
            yield from _chain(part)
        found = found.__cause__ or found.__context__
