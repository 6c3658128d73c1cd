"""Functions that ``torch.compile`` is not to trace: they communicate, and change what stands in the module.

A compiled module, or a module with compiled parts, computes between them as compiled.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which runs as plain Python wherever it is called from."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:  # not where it is defined: it takes a second to import torch's compiler
            disabled = torch.compiler.disable(function, reason="shardlab gathers and releases parameters here")
        return disabled(*args, **kwargs)

    return run
