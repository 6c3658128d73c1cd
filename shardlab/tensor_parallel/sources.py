"""Is a layer's input computed as the layer takes it, whole or in parts? Read from its graph; nothing is sent.

Between columns and rows each rank computes with its own features, or tokens, and so has a part of the gradient of all
that is whole there: of a whole layer beside divided ones, or of a norm without style. Where all is whole, each rank has
all of a gradient, and a sum over the ranks would be N times it; dropout that differs by rank would drive ranks apart.
All this trains, and wrong. A border says which kind of gradient it takes; so does a parameter that ``NAME`` marks as
whole. Functions in Python that are no border end the search: they may sum gradients themselves.

Legend: N ranks of the tensor axis.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from shardlab.comm import Communicator
from shardlab.comm.autograd_collectives import border_of
from shardlab.comm.trees import tensors_in
from shardlab.tensor_parallel.sequence import is_summed

NAME = "_name_of_whole"  # at the parameter itself: a list of them would keep each alive


def check_sources(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an input from which some gradient would be a part, or a multiple, of what it should be.

    A forward pre-hook, up to the first backward; at module level, so that a layer with it can be copied and pickled.

    Args:
        layer: with ``name``, ``comm``, ``is_checked`` and ``takes_parts``, whether its input differs by rank.
        args: of its forward.
        kwargs: of its forward.

    Raises:
        ValueError: what is in parts is computed with what is whole, or the other way round.
    """
    if layer.is_checked or torch.compiler.is_compiling():  # of what is compiled the graph says little
        return
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is None or tensor.grad_fn is None:
        return
    # Not at once: a layer that is called twice has two inputs.
    tensor.register_hook(lambda _: setattr(layer, "is_checked", True))
    for source, takes_parts in _sources(tensor.grad_fn, layer.comm):
        if layer.takes_parts and not takes_parts:
            raise ValueError(
                f"{layer.name}: it takes an input in parts, and this one is computed with {source!r}, which is whole: "
                "each rank would have a part of its gradient. Divide that too, give a norm OnSequence(), or let "
                "shardlab.tensor_parallel.copy(tensor, comm) take what is whole, which sums the gradient. Where all is "
                "whole, leave out OwnDropout()"
            )
        if takes_parts and not layer.takes_parts:
            raise ValueError(
                f"{layer.name}: it takes a whole input, and this one is computed with {source!r}, whose gradient is "
                "summed over the ranks, as for parts: it would be too large. Leave out OnSequence(), or end the parts "
                "with a Row()"
            )


def _sources(start: Any, comm: Communicator) -> Iterator[tuple[str, bool]]:
    """The nearest borders and marked parameters below ``start``, and whether each takes parts of a gradient."""
    seen, ahead = {None}, [start]
    while ahead:
        if (node := ahead.pop()) in seen:
            continue
        seen.add(node)
        leaf: Any = getattr(node, "variable", None)
        if (border := border_of(node)) is not None and list(border[0]) == list(comm.ranks):
            yield border[1:]
        elif name := getattr(leaf, NAME, ""):
            yield name, is_summed(leaf)
        elif not isinstance(node, BackwardCFunction):
            ahead += [following for following, _ in node.next_functions]
