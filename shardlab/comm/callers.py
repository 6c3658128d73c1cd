"""Which line of a person's code has led to a call: of a message, or of an operation in autograd's threads."""

import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from shardlab.comm.events import CollectiveEvent

_ROOMS = ("comm", "context", "engines", "faults", "pipeline", "recording", "same", "tensor_parallel", "trace")
_OWN = Path(__file__).parent.parent
_LIBRARY = (*(str(_OWN / room) for room in (*_ROOMS, "launch/hang_board")), str(Path(torch.__file__).parent))
_STANDARD_LIBRARY = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen ")
_AUTOGRAD = torch.autograd.graph.__file__


def locate(event: CollectiveEvent) -> str:
    """``file:line`` of the caller outside the library; asked by an observer to which ``event`` is being announced."""
    event.source_line = event.source_line or line_of_caller()
    return event.source_line


def line_of_caller() -> str:
    """``file:line`` of the first frame outside the rooms that only pass calls on: the line a person can look at."""
    line, installed, frame = "", "", sys._getframe().f_back
    while frame is not None:  # at every message: neither a generator nor a call for each frame
        file = frame.f_code.co_filename
        here = f"{file}:{frame.f_lineno}"
        if not is_library(file):
            if "/site-packages/" not in file:
                return here
            installed = installed or here  # of a package between a person's code and torch
        line = line if _is_standard_library(file) else here
        frame = frame.f_back
    if installed:
        return installed
    outside = (one for one in callers(sys._getframe()) if not is_library(one.f_code.co_filename))
    found = next(outside, None)  # in the thread that waits for this one
    return line if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


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
