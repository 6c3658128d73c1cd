"""Wrappers of functions that give parameters their data, whatever mode of torch the user's code runs in."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

P = ParamSpec("P")
R = TypeVar("R")

# What ``torch.compile`` runs as plain Python and never traces: it communicates, or replaces parameters of the module.
# What a compiled module computes between two such functions stays compiled. Private: ``torch.compiler.disable`` would
# import the compiler, which takes a second, together with this file.
untraced = _disable_dynamo


def in_plain_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that what it makes can train, though inference mode or a ``torch.func`` transform is on.

    A parameter with the data of an inference tensor could never train again. And as ``unrefused``.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Private: there is no public way to ask whether a transform of torch.func runs, nor to leave it. Inside it new
        # tensors are wrappers without memory, which nothing can be received into.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return run(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # With ``no_grad``: to end inference mode is to switch gradients on.
            with torch.inference_mode(mode=False), torch.no_grad():
                return run(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


def unrefused(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that sharded parameters answer it as plain ones do, without being asked whether they may."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


def nothing(*_: Any, **__: Any) -> None:
    """A hook that does nothing; at module level, since a pickle refers to it by name."""
