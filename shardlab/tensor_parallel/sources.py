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
from torch import nn
from torch.autograd.function import BackwardCFunction

from shardlab.comm import Communicator
from shardlab.comm.autograd_collectives import border_of
from shardlab.comm.trees import tensors_in
from shardlab.tensor_parallel.flow import nodes_below
from shardlab.tensor_parallel.sequence import is_summed

NAME = "_name_of_whole"  # at the parameter itself: a list of them would keep each alive


class InputCheck:
    """A forward pre-hook: refuses, up to the first backward, an input from which some gradient would be wrong.

    Args:
        comm: the tensor axis.
        name: of the layer that has the hook.
        in_parts: it takes an input that differs by rank; False takes one that is equal on all ranks.
    """

    def __init__(self, comm: Communicator, name: str, *, in_parts: bool) -> None:
        self._comm, self._name, self._in_parts, self._is_done = comm, name, in_parts, comm.num_ranks == 1

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the first tensor that the layer is called with.

        Raises:
            ValueError: what is in parts is computed with what is whole, or the other way round.
        """
        if self._is_done or torch.compiler.is_compiling():  # of what is compiled the graph says little
            return
        tensor = next(tensors_in((args, kwargs)), None)
        if tensor is None or tensor.grad_fn is None:
            return
        # Not at once: a layer that is called twice has two inputs.
        tensor.register_hook(lambda _: setattr(self, "_is_done", True))
        for source, takes_parts in _sources(tensor.grad_fn, self._comm):
            if self._in_parts and not takes_parts:
                raise ValueError(
                    f"{self._name}: it takes an input in parts, and this one is computed with {source!r}, which is "
                    "whole: each rank would have a part of its gradient. Divide that too, give a norm OnSequence(), or "
                    "let shardlab.tensor_parallel.copy(tensor, comm) take what is whole, which sums the gradient; "
                    "where all is whole, leave out OnSequence() or OwnDropout()"
                )
            if takes_parts and not self._in_parts:
                raise ValueError(
                    f"{self._name}: it takes a whole input, and this one is computed with {source!r}, whose gradient "
                    "is summed over the ranks, as for parts: it would be too large. Leave out OnSequence(), or end the "
                    "parts with a Row()"
                )


def _sources(start: Any, comm: Communicator) -> Iterator[tuple[str, bool]]:
    """The nearest borders and marked parameters below ``start``, and whether each takes parts of a gradient."""
    for node in nodes_below(start, is_end=lambda node: isinstance(node, BackwardCFunction)):  # as borders are, too
        leaf: Any = getattr(node, "variable", None)
        if (border := border_of(node)) is not None and list(border[0]) == list(comm.ranks):
            yield border[1:]
        elif name := getattr(leaf, NAME, ""):
            yield name, is_summed(leaf)
