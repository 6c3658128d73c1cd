"""What autograd says of a backward: whose gradients it brings, whether it may run others inside it, when it ends."""

from collections.abc import Callable, Iterable
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


def accumulates(params: Iterable[nn.Parameter]) -> bool:
    """In a hook that autograd runs: whether some of these will get gradients.

    ``torch.autograd.grad`` calls the same hooks and gives them none.
    """
    nodes = [gradient_node(param) for param in params if param.requires_grad]
    try:
        # Private: there is no public way to ask.
        return any(map(torch._C._will_engine_execute_node, nodes)) or (bool(nodes) and nests_here())
    except (RuntimeError, AttributeError):
        # Torch has no answer where torch.autograd.grad was called for this very parameter, nor inside torch.func.
        return False


def is_in_backward_of(param: nn.Parameter) -> bool:
    """In the hook of a parameter's gradient: whether a backward brings it, and no ``torch.autograd.grad``."""
    try:
        # Only whether it answers: no is also said of a node that is new, where another dtype was shown since.
        torch._C._will_engine_execute_node(gradient_node(param))
    except (RuntimeError, AttributeError):  # as above
        return False
    return True


def call_at_end(call: Callable[[], None]) -> None:
    """Have ``call`` called at the end of the backward that runs."""
    # Private: there is no public way.
    torch.autograd.Variable._execution_engine.queue_callback(call)


def move_last(hooks: Iterable[tuple[dict[int, Any], int]]) -> None:
    """Move the hook of each parameter's gradient behind those registered since, which may change gradients.

    Args:
        hooks: the hooks of a parameter's gradient, and the number of the one that is moved.
    """
    for known, number in hooks:
        if len(known) > 1 and next(reversed(known)) != number:
            known[number] = known.pop(number)
