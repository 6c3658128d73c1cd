"""A model looked at without running a step: what a backward would reach, and parameters without their values."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

# Private: there is no public way to ask for a parameter's hooks.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


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


@contextlib.contextmanager
def without_values(param: nn.Parameter, dtype: torch.dtype) -> Iterator[None]:
    """Inside, a parameter has no values, and of several elements cannot be written to; at the end it is what it was."""
    data, gradient, trains, attributes = param.data, param.grad, param.requires_grad, dict(vars(param))
    hooks = {kind: dict(getattr(param, kind) or {}) for kind in _HOOKS}
    param.grad = None  # it would have another dtype
    # Expanded: torch refuses to write where elements share their memory.
    param.data = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
    try:
        yield
    finally:
        param.grad = None
        param.data = data
        param.grad = gradient
        param.requires_grad_(trains)
        vars(param).clear()
        vars(param).update(attributes)
        for kind, known in hooks.items():
            if (now := getattr(param, kind)) is not None:
                now.clear()
                now.update(known)
