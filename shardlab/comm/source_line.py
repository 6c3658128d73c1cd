"""Where in the user's code a collective was issued."""

import sys
from pathlib import Path

import torch

_INSIDE = (
    *(str(Path(__file__).parent.parent / room) for room in ("comm", "engines", "tensor_parallel")),
    str(Path(torch.__file__).parent),
)


def caller_of_library() -> str:
    """``file:line`` of the first frame outside the rooms that only pass calls on: the line a person can look at."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
