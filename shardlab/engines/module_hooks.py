"""What an engine puts on a module: hooks that ``torch.compile`` skips, another forward.

A copy of a wrapped module (``copy.deepcopy``, pickle, ``torch.save``) is a plain module that trains alone. If it kept
the hooks, its forward would gather the original's parameters.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import _is_checkpoint_valid
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from shardlab.engines.plain_mode import WHY, unrefused
from shardlab.vocabulary import class_of


@unrefused
def gradient_node(param: nn.Parameter) -> Any:
    """Autograd's node that accumulates the gradients of a parameter; torch views it to find out."""
    return get_gradient_edge(param).node


def nodes_below(node: Any) -> set[Any]:
    """The node and all that a backward reaches from it; nothing without a node, or if it is a parameter's own."""
    seen: set[Any] = set()
    ahead = [node] if node is not None and node.next_functions else []
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return seen


def may_nest(node: Any) -> bool:
    """Whether it may run a backward of its own, as reentrant checkpointing does: any function in Python may."""
    if not isinstance(node, BackwardCFunction):
        return False
    function: Any = node._forward_cls  # type: ignore[attr-defined]
    return not getattr(function, "runs_no_backward", False)


def nests_here() -> bool:
    """In a hook that autograd runs: whether this backward may run others inside it, which it does not show.

    Never in ``torch.autograd.grad``, which torch refuses there.
    """
    # Private: there is no public way to ask for the node whose hook this is.
    return _is_checkpoint_valid() and any(map(may_nest, nodes_below(torch._C._current_autograd_node())))


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls a method while its object lives; torch keeps hooks where no garbage collector looks."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        if (known := reference()) is not None:
            known(*args)

    return hook


class ModuleHook:
    """A forward hook or forward pre-hook that is not traced, and that does nothing in copies of the module."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        # Now: made lazily inside a trace it would belong to that trace alone, and the next model's would be None.
        self._hook = torch.compiler.disable(hook, reason=WHY)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return nothing


def nothing(*_: Any, **__: Any) -> None:
    """A hook that does nothing; at module level, since a pickle refers to it by name."""


@contextlib.contextmanager
def forward_is(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the first call of ``module`` runs ``function`` instead of ``forward``; calls inside that one do not.

    Torch's own way to treat a method as forward, ``register_fsdp_forward_method``, works with its FSDP2 only.

    Raises:
        ValueError: ``function`` cannot be called.
    """
    if not callable(function):
        raise ValueError(
            f"function: {class_of(function)} cannot be called; give a method or a function, for example "
            "engine.call(engine.module.encode, x)"
        )
    own = vars(module).get("forward")  # of the instance, not of its class

    def restore() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            vars(module)["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        # First: ``function`` may call the module, which must then run its own forward.
        restore()
        return function(*args, **kwargs)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        restore()
