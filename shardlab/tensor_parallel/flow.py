"""Which layer's output reaches which layer's input, read from the graph of one forward.

Between a column-parallel layer and a row-parallel one each rank has its own features. So a layer can be a column only
if its output goes nowhere but into rows, and a row only if its input comes from columns alone. Names say nothing of
this, and the order in which a module registers its layers neither; the autograd graph of the loss does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm.trees import tensors_in

Run = Callable[[Any], Any]
"""Calls a module as its training does, and returns the loss or any outputs: ``lambda model: loss(model, batch)``."""
START, END = "the batch", "the loss"
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Flow:
    """The layers of a module that were called, in this order: ``nn.Linear`` and ``nn.Embedding``.

    Attributes:
        feeders: names of the layers whose outputs reach a layer's input without another layer in between; of ``END``,
            those that reach the result. ``START`` if a call's input comes from none.
        between: names of the parameters used on that way.
        dropouts: the feeders of each of ``DROPOUTS`` that was called.
    """

    feeders: dict[str, frozenset[str]]
    between: dict[str, frozenset[str]]
    dropouts: dict[str, frozenset[str]]

    @property
    def layers(self) -> list[str]:
        """Names in the order of the first call."""
        return [name for name in self.feeders if name != END]

    def consumers(self, layer: str) -> frozenset[str]:
        """The layers, and ``END``, that a layer feeds."""
        return frozenset(name for name, feeders in self.feeders.items() if layer in feeders)


def is_layer(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it computes as torch's own: with a forward of its own it may do anything."""
    return isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)


def summed(result: Any) -> Tensor:
    """One number that depends on all tensors of a result that depend on a parameter, to run a backward from.

    Raises:
        ValueError: there is none.
    """
    found = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise ValueError("run: it returned no tensor that depends on a parameter; return the loss, or the output")
    # In at least float32: half precision would hide small differences, and so would float32 those of float64.
    squares = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square().mean() for tensor in found]
    return torch.stack(squares).sum()


def flow_of(module: nn.Module, run: Run) -> Flow:
    """The flow of one forward.

    Args:
        module: all of its parameters require gradients.
        run: calls it.
    """
    # Keep the nodes alive until the graph has been read: a new node could get the id of a freed one.
    outputs: dict[Any, str] = {}
    inputs: dict[str, list[Any]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def called(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # By its name too, as in layer(input=x).
            node = next((tensor.grad_fn for tensor in tensors_in((args, kwargs))), None)
            inputs.setdefault(name, []).append(node)
            if not isinstance(part, DROPOUTS):
                outputs[output.grad_fn] = name

        return called

    hooks = [
        part.register_forward_hook(watch(name), with_kwargs=True)
        for name, part in module.named_modules()
        if is_layer(part, nn.Linear) or is_layer(part, nn.Embedding) or isinstance(part, DROPOUTS)
    ]
    try:
        result = run(module)
    finally:
        for hook in hooks:
            hook.remove()
    names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
    inputs[END] = [summed(result).grad_fn]
    feeders: dict[str, frozenset[str]] = dict.fromkeys(inputs, frozenset())
    between = dict(feeders)
    for name, node in ((name, node) for name, nodes in inputs.items() for node in nodes):
        ends = list(_reached(node, outputs))
        feeders[name] |= {end for end in ends if isinstance(end, str)} or {START}
        between[name] |= {names[end] for end in ends if isinstance(end, Tensor) and end in names}
    dropped = [name for name in inputs if name != END and isinstance(module.get_submodule(name), DROPOUTS)]
    dropouts = {name: feeders.pop(name) for name in dropped}
    return Flow(feeders, between, dropouts)


def nodes_below(start: Any, is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """The node and all of the graph that a backward reaches from it, each once; of what ``is_end``, nothing behind it.

    A tensor that was not computed is the ``variable`` of its node.
    """
    seen, ahead = set(), [start]
    while ahead:
        if (node := ahead.pop()) is not None and node not in seen:
            seen.add(node)
            yield node
            if not is_end(node):
                ahead += [following for following, _ in node.next_functions]


def _reached(start: Any, outputs: dict[Any, str]) -> Iterator[str | Tensor]:
    """Names of the layers, and the leaf tensors, at the nearest ends of the graph below ``start``."""
    for node in nodes_below(start, is_end=outputs.__contains__):
        if node in outputs:
            yield outputs[node]
        elif hasattr(node, "variable"):
            yield node.variable
