"""What a pool and its ranks say to each other over a rank's control pipe."""

from dataclasses import dataclass

from shardlab.launch.payload import Payload


@dataclass(frozen=True)
class Task:
    """To a rank: call this. ``call`` holds (function, args, kwargs); ``sys_path`` is the parent's, as it is now."""

    call: Payload
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """To a rank: leave the group and end."""


@dataclass(frozen=True)
class Answer:
    """From a rank: the function returned this. The first of every rank, empty, says that the group is up."""

    result: Payload


@dataclass(frozen=True)
class Note:
    """From a rank, while its function runs: what it gave to ``emit``."""

    message: Payload


@dataclass(frozen=True)
class Failure:
    """From a rank: an exception. ``time_ns`` orders the failures of several ranks."""

    rank: int
    time_ns: int
    exception_type: str
    summary: str
    traceback_text: str
    exception: Payload | None
