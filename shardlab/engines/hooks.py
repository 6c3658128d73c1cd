"""What an engine puts on a module: hooks that ``torch.compile`` leaves alone and copies do not have, and a forward.

A copy of a wrapped module (``copy.deepcopy``, pickle, ``torch.save``) is a plain module that trains alone. Were it to
take the hooks along, it would gather the original's parameters in its forward.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which runs as plain Python wherever it is called from.

    ``torch.compile`` is not to trace what communicates and changes what stands in the module; a compiled module, or one
    with compiled parts, computes between such functions as compiled.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:  # not where it is defined: it takes a second to import torch's compiler
            disabled = torch.compiler.disable(function, reason="shardlab gathers and releases parameters here")
        return disabled(*args, **kwargs)

    return run


class ModuleHook:
    """A forward hook or forward pre-hook that is not traced; in copies of the module it does nothing."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = untraced(hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return nothing


def nothing(*_: Any, **__: Any) -> None:
    """A hook that does nothing; a function of a module, since a pickle must name it."""


@contextlib.contextmanager
def forward_is(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the first call of ``module`` runs ``function`` instead of ``forward``; calls inside that one do not.

    Torch's own way to have a method treated as forward, ``register_fsdp_forward_method``, knows its FSDP2 only.

    Raises:
        ValueError: ``function`` cannot be called.
    """
    if not callable(function):
        raise ValueError(
            f"function: a method or function is needed, for example engine.call(engine.module.encode, x), and not a "
            f"{type(function).__name__}"
        )
    own = vars(module).get("forward")  # of the instance, not of its class

    def restore() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            vars(module)["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()  # it may itself call the module
        return function(*args, **kwargs)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        restore()
