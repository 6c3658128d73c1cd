"""Which line of a person's code has led to a call: of a message, or of an operation in autograd's threads.

And calls of torch.distributed that a person's code must not make: one process that trains alone would wait in them. A
call is seen where torch's dispatcher takes it, whatever function of torch.distributed it came from. What our
communicators send, and what a layer of torch sends (a synchronised BatchNorm), passes.
"""

import contextlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardlab.comm.events import CollectiveEvent
from shardlab.comm.observed_group import ObservedGroup
from shardlab.comm.torch_engine_groups import BELOW, kernels, operations

_ROOMS = ("comm", "context", "engines", "faults", "pipeline", "recording", "same", "tensor_parallel", "trace")
_OWN, _TORCH = Path(__file__).parent.parent, str(Path(torch.__file__).parent)
_LAYERS = str(Path(_TORCH) / "nn")  # of torch
_LIBRARY = (*(str(_OWN / room) for room in (*_ROOMS, "launch/hang_board")), _TORCH)
_STANDARD_LIBRARY = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen ")
_AUTOGRAD = torch.autograd.graph.__file__


def locate(event: CollectiveEvent) -> str:
    """``file:line`` of the caller outside the library; asked by an observer to which ``event`` is being announced."""
    event.source_line = event.source_line or line_of_caller()
    return event.source_line


@contextlib.contextmanager
def from_one_line(group: ObservedGroup) -> Iterator[None]:
    """Inside, all collectives of a group are of the line that calls now: of small ones it is long to look each time."""
    group.line = line_of_caller()
    try:
        yield
    finally:
        group.line = ""


def line_of_caller() -> str:
    """``file:line`` of the first frame outside the rooms that only pass calls on: the line a person can look at."""
    installed = outermost = None
    frame = sys._getframe().f_back
    while frame is not None:  # at every message: neither a generator nor a text for each frame
        file = frame.f_code.co_filename
        if not is_library(file):
            if "/site-packages/" not in file:
                return _place_of(frame)
            installed = installed or frame  # of a package between a person's code and torch
        if not _is_standard_library(file):
            outermost = frame
        frame = frame.f_back
    outside = (one for one in callers(sys._getframe()) if not is_library(one.f_code.co_filename))
    found = installed or next(outside, outermost)  # in the thread that waits for this one
    return "" if found is None else _place_of(found)


def _place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it, the innermost first; None for a call from C++ without any.

    Autograd does a backward on a device in a thread that begins in C++. There, the frames of the thread that waits in
    ``backward()`` follow.
    """
    last = None
    for last in _outwards(frame):
        yield last
    begins_in_python = last is not None and last.f_code.co_filename == threading.__file__
    if threading.get_ident() != threading.main_thread().ident and not begins_in_python:
        # Of another thread that has called autograd and waits for it.
        waits = (frame for frame in sys._current_frames().values() if frame.f_code.co_filename == _AUTOGRAD)
        yield from _outwards(next(waits, None))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _is_standard_library(path: str) -> bool:
    # Except in a virtual environment, other packages are installed in a folder of the standard library.
    is_installed = "/site-packages/" in path or "/dist-packages/" in path
    return path.startswith(_STANDARD_LIBRARY) and not is_installed


@cache
def is_library(path: str) -> bool:
    """Whether a frame of this file only passes calls on: one of torch, of Python, or of the rooms that send."""
    return path.startswith(_LIBRARY) or _is_standard_library(path)


PAST = (
    "sends by torch.distributed itself, which nobody counts; send over self.comm, or over communicators of given.mesh"
)


def num_sent_by_torch() -> int:
    """How many collectives the default group has sent: of a step those that went past every communicator."""
    # Private: there is no public way to ask.
    group: Any = dist.group.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())


@contextlib.contextmanager
def own_calls_refused(advice: str) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Inside, a collective that a user's file calls in a watched block raises ValueError.

    Args:
        advice: what the error says.

    Yields:
        What makes such a block, on its thread alone: what is queued is sent on others.
    """
    thread: int | None = None  # that runs the watched block

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        nonlocal thread
        thread = threading.get_ident()
        try:
            yield
        finally:
            thread = None

    def kernel(op: Any) -> Callable[..., Any]:
        def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if thread == threading.get_ident() and _is_own():
                raise ValueError(advice)
            return op.redispatch(keys & BELOW, *args, **kwargs)

        return call

    with kernels("c10d") as library:
        for name, op, _ in operations():
            library.impl(name, kernel(op), "BackendSelect", with_keyset=True)
        yield watched


def _is_own() -> bool:
    """Whether a call came from a file of the user, through nothing but torch.distributed."""
    # A dispatch mode, as of a traced step, only passes calls on.
    frames = (frame.f_code for frame in callers(sys._getframe(2)))
    files = (code.co_filename for code in frames if code.co_name != "__torch_dispatch__")
    caller = next((file for file in files if not file.startswith(_TORCH) or file.startswith(_LAYERS)), "")
    return bool(caller) and not caller.startswith((str(_OWN), _LAYERS))
