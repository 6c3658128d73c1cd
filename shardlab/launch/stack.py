"""Collectives that no communicator reports, such as a plain ``dist.all_reduce``, found on the rank's Python stack.

A learner's cell may call ``dist.all_reduce(x)``: it makes no event, and yet a hang should name it. So a rank's watcher
thread looks at the main thread's stack a few times a second. If the innermost Python frame is in torch's
collectives module, or in a communicator that nobody observes, the rank is inside that call. Asynchronous calls of torch
that are waited for in user code do not show: the group's own timeout ends those.
"""

import concurrent.futures
import queue
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

from torch.distributed import distributed_c10d

from shardlab.comm.group import is_library
from shardlab.installed import PACKAGE

_COLLECTIVES_FILE = str(distributed_c10d.__file__)
_COMM_FOLDER = str(PACKAGE / "comm")
# A communicator that waits for its thread is, innermost, in one of these.
_WAIT_FILES = (str(threading.__file__), str(queue.__file__), str(concurrent.futures._base.__file__))
_PACKAGE = str(PACKAGE)

Frame = tuple[FrameType, int | None]


@dataclass(frozen=True)
class SeenCall:
    """A collective found on a stack; it has the fields of a ``CollectiveEvent`` that the board shows."""

    op: str
    source_line: str
    issue_ns: float
    seq: int = -1
    axis: str = ""
    dtype: str = ""
    numel: int = 0
    tag: str = ""
    ranks: tuple[int, ...] = ()


class StackWatch:
    """Looks at one thread's stack and recognises the call that the last look found."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._call: SeenCall | None = None
        self._mark = _Mark()

    def look(self) -> SeenCall | None:
        """The collective the thread is in; the same object for as long as it is the same call."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or not _is_collective(walk_stack(frame)):
            self._call = None
            return None
        # The mark lives and dies with the frame, so a second call of the same function is never taken for the first.
        # (Comparing id(frame) would take it so: freed frames are re-used. Keeping the frame would keep its tensors.)
        if self._call is None or frame.f_trace is not self._mark:
            self._mark = frame.f_trace = _Mark()
            self._call = _call_of(walk_stack(frame))
        return self._call


def failed_call(traceback: TracebackType | None) -> SeenCall | None:
    """The collective in which an exception was raised; None if it was raised elsewhere."""
    frames = list(walk_tb(traceback))[::-1]
    return _call_of(frames) if _is_collective(frames) else None


def _is_collective(frames: Iterable[Frame]) -> bool:
    """Whether the innermost frame that does not merely wait for a thread belongs to a collective."""
    files = (frame.f_code.co_filename for frame, _ in frames)
    return _is_collective_file(next((file for file in files if file not in _WAIT_FILES), ""))


def _is_collective_file(file: str) -> bool:
    return file == _COLLECTIVES_FILE or file.startswith(_COMM_FOLDER)


def _call_of(frames: Iterable[Frame]) -> SeenCall:
    """``frames``: innermost first."""
    op = of_package = of_user = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if is_library(file):
            if _is_collective_file(file):
                op = _name_of(frame)  # the outermost: all_gather_bytes, not the all_gather inside it
        elif file.startswith(_PACKAGE):
            of_package = of_package or f"{file}:{line}"
        else:
            of_user = f"{file}:{line}"
            break
    return SeenCall(op, of_user or of_package, perf_counter_ns())


def _name_of(frame: FrameType) -> str:
    """The function's name; a class's where its objects are made, so ``Mesh`` and not ``__init__``."""
    name = frame.f_code.co_qualname.removesuffix(".__init__")
    return name.rpartition(".")[2]


class _Mark:
    """A trace function that traces nothing; each is told from every other by identity."""

    def __call__(self, *_: object) -> None:
        return None
