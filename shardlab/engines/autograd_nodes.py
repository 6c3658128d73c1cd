"""What autograd's graph says of a backward: whose gradients it brings, and whether it may run others inside it."""

from typing import Any

import torch
from torch import nn
from torch.autograd import _is_checkpoint_valid
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from shardlab.engines.plain_mode import unrefused


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
