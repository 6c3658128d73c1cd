"""Another function in the place of a module's forward, for one call: between the same hooks, under the same engine."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


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
