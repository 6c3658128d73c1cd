"""Is a layer's input computed as the layer takes it, whole or in parts? Read from its graph; nothing is sent.

Between columns and rows each rank computes with its own features, or tokens, and so has a part of the gradient of all
that is whole there: of a whole layer beside divided ones, or of a norm without style. Where all is whole, each rank has
all of a gradient, and a sum over the ranks would be N times it. Both train, and wrong. A border says which kind of
gradient it takes; so does a parameter that ``NAME`` marks as whole. Functions in Python that are no border end the
search: they may sum gradients themselves. N: ranks of the tensor axis.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from shardlab.comm import Communicator
from shardlab.comm.autograd_collectives import border_of
from shardlab.tensor_parallel.sequence import is_summed

NAME = "_name_of_whole"  # at the parameter itself: a list of them would keep each alive


def check_sources(layer: str, tensor: Tensor, comm: Communicator, *, in_parts: bool) -> None:
    """Refuse an input from which some gradient would be a part, or a multiple, of what it should be.

    Args:
        layer: its name.
        tensor: its input.
        comm: the tensor axis.
        in_parts: the input differs by rank; False takes one that is equal on all ranks.

    Raises:
        ValueError: it is computed with what is whole if it is in parts, or the other way round.
    """
    for source, takes_parts in _sources(tensor.grad_fn, comm):
        if in_parts and not takes_parts:
            raise ValueError(
                f"{layer}: its input is in parts, and is computed with {source!r}, which is whole: each rank would "
                "have a part of its gradient. Divide that too, give a norm OnSequence(), or let shardlab."
                "tensor_parallel.copy(tensor, comm) take what is whole, which sums the gradient"
            )
        if takes_parts and not in_parts:
            raise ValueError(
                f"{layer}: its input is whole, and is computed with {source!r}, whose gradient is summed over the "
                "ranks, as for parts: it would be too large. Leave out OnSequence(), or end the parts with a Row()"
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
