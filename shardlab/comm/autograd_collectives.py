"""Collectives that gradients flow through: borders between tensors that ranks hold whole and in parts.

=================  ==============  ==============  ===========================================================
border             forward         backward        use
=================  ==============  ==============  ===========================================================
copy               nothing         all-reduce      alike -> alike, where each rank then computes a part of it
reduce             all-reduce      nothing         terms -> their sum, alike
gather             all-gather      own part        parts -> whole, where all ranks then compute the same
scatter            own part        all-gather      alike -> parts, where each rank then computes with its own
all_gather         all-gather      reduce-scatter  parts -> whole, where each rank then computes a part of it
reduce_scatter     reduce-scatter  all-gather      terms -> their sum, in parts
exchange           all-to-all      all-to-all      parts along one dim -> parts along another
begin_shift,       to the next     to the one      parts travel around the ring of ranks, while each rank
end_shift                          before          computes with those that it has
=================  ==============  ==============  ===========================================================

``copy`` and ``reduce`` are each other's conjugates, so are ``gather`` and ``scatter``, ``all_gather`` and
``reduce_scatter``: the backward of one is the forward of the other, and that again has a gradient. Parts are equal and
lie along one dim. An all-reduce of S elements sends 2S(N-1)/N a rank, a shift S, the others S(N-1)/N. Each call waits
for its result, but for ``begin_shift``. A group of one moves nothing and returns the tensor itself.

``torch.compile`` does not trace a border: what is computed between two of them is compiled.
``tag`` names the tensor; in backward the record says "gradient of" it. Under activation checkpointing the forward is
run again, and its collectives with it.
Source: Shoeybi et al., arXiv 1909.08053, section 3 (f and g); Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import Node

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending, wait_all
from shardlab.partition.slices import require_divisible

Move = Callable[[Tensor, Communicator, int, str], Tensor]

# What ``torch.compile`` runs as plain Python and never traces. Private: ``torch.compiler.disable`` would import the
# compiler, which takes a second, together with this file.
untraced = _disable_dynamo


def copy(tensor: Tensor, comm: Communicator, *, tag: str = "") -> Tensor:
    """The tensor itself; its gradient is summed over the ranks.

    Args:
        tensor: any shape, equal on all ranks.
        comm: the ranks.
        tag: what the tensor is.
    """
    return _cross(tensor, _same, _summed, comm, 0, tag)


def is_copy(node: Node) -> bool:
    """Whether a node of the graph is that of a ``copy``: gradients that pass it are summed over the ranks."""
    back, *_ = getattr(node, "conjugate", (None,))
    return back is _summed


def border_of(node: Node) -> tuple[Sequence[int], str, bool] | None:
    """Of a border's node: its ranks, what crosses, and whether it takes parts of a gradient, or one that is alike."""
    conjugate: Any = getattr(node, "conjugate", ())
    if len(conjugate) != 5:  # a hop's are fewer
        return None
    back, _, comm, _, tag = conjugate
    return comm.ranks, tag.removeprefix("gradient of "), back not in (_same, _own_part)


def reduce(tensor: Tensor, comm: Communicator, *, tag: str = "") -> Tensor:
    """The sum over the ranks; the gradient, equal on all ranks, is passed on.

    Args:
        tensor: any shape, this rank's term.
        comm: the ranks.
        tag: what the sum is.
    """
    return _cross(tensor, _summed, _same, comm, 0, tag)


def gather(tensor: Tensor, comm: Communicator, dim: int, *, tag: str = "") -> Tensor:
    """The parts of all ranks side by side along ``dim``; of the gradient, equal on all ranks, each keeps its part."""
    return _cross(tensor, _gathered, _own_part, comm, dim, tag)


def scatter(tensor: Tensor, comm: Communicator, dim: int, *, tag: str = "") -> Tensor:
    """This rank's part along ``dim`` of a tensor that all ranks have; the gradient is gathered.

    Raises:
        ValueError: the ranks do not divide ``dim``.
    """
    return _cross(tensor, _own_part, _gathered, comm, dim, tag)


def all_gather(tensor: Tensor, comm: Communicator, dim: int, *, tag: str = "") -> Tensor:
    """The parts of all ranks side by side along ``dim``; the ranks' gradients are summed and each keeps its part."""
    return _cross(tensor, _gathered, _summed_part, comm, dim, tag)


def reduce_scatter(tensor: Tensor, comm: Communicator, dim: int, *, tag: str = "") -> Tensor:
    """This rank's part along ``dim`` of the sum over the ranks; the gradient is gathered.

    Raises:
        ValueError: the ranks do not divide ``dim``.
    """
    return _cross(tensor, _summed_part, _gathered, comm, dim, tag)


def exchange(tensor: Tensor, comm: Communicator, *, tag: str = "") -> Tensor:
    """Row j along dim 0 goes to rank j, and row i comes from rank i; so does the gradient.

    Raises:
        ValueError: there is not a row for each rank.
    """
    if len(tensor) != comm.num_ranks:
        raise ValueError(
            f"tensor: {tag or 'it'} has {len(tensor)} rows along dim 0; give one for each of {comm.num_ranks}"
        )
    return _cross(tensor, _exchanged, _exchanged, comm, 0, tag)


class Hop:
    """A tensor on its way around the ring, from ``begin_shift`` to ``end_shift``; and its gradient, on the way back."""

    def __init__(self, comm: Communicator, by: int, tag: str) -> None:
        self._comm, self._by, self._tag = comm, by, tag
        self._under_way: list[Pending] = []

    @cached_property
    def back(self) -> "Hop":
        """The gradient's."""
        return Hop(self._comm, -self._by, f"gradient of {self._tag}" if self._tag else "gradient")

    def begin(self, tensor: Tensor) -> Tensor:
        """Send it on, and return the memory that will have what comes."""
        comm = self._comm
        # Zeros: torch's anomaly mode looks for NaNs in gradients, also in one that has not come yet.
        output = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        self._under_way = [
            comm.send(tensor, (comm.rank + self._by) % comm.num_ranks, tag=self._tag),
            comm.recv(output, (comm.rank - self._by) % comm.num_ranks, tag=self._tag),
        ]
        return output

    def end(self, tensor: Tensor) -> Tensor:
        """Wait for what ``begin`` has returned."""
        wait_all(self._under_way)
        return tensor.view_as(tensor)


def begin_shift(tensor: Tensor, comm: Communicator, *, tag: str = "") -> tuple[Tensor, Hop]:
    """Send the tensor to the next rank of the ring; give what is returned to ``end_shift``, and compute meanwhile.

    In backward the gradient travels while the backward of what stands between the two calls is computed.
    """
    hop = Hop(comm, 1, tag)
    return (tensor, hop) if comm.num_ranks == 1 else (_hop(tensor, hop, Hop.begin, Hop.end), hop)


def end_shift(arriving: Tensor, hop: Hop) -> Tensor:
    """The tensor of the rank before, of what ``begin_shift`` has returned."""
    return arriving if hop._comm.num_ranks == 1 else _hop(arriving, hop, Hop.end, Hop.begin)


def _cross(tensor: Tensor, there: Move, back: Move, comm: Communicator, dim: int, tag: str) -> Tensor:
    if comm.num_ranks == 1:
        return tensor
    if not -tensor.dim() <= dim < max(tensor.dim(), 1):
        raise ValueError(f"dim: {dim} is not one of the {tensor.dim()} dims of {tag or 'the tensor'}")
    return _crossed(tensor, there, back, comm, dim, tag)


@untraced
def _crossed(tensor: Tensor, there: Move, back: Move, comm: Communicator, dim: int, tag: str) -> Tensor:
    crossed: Tensor = _Border.apply(tensor, there, back, comm, dim, tag)  # type: ignore[no-untyped-call]
    return crossed


class _Border(torch.autograd.Function):
    """``there`` in forward, ``back`` in backward."""

    runs_no_backward = True  # for engines that ask what a backward will reach

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move, comm: Communicator, dim: int, tag: str) -> Tensor:
        ctx.conjugate = (back, there, comm, dim, f"gradient of {tag}" if tag else "gradient")
        return there(tensor, comm, dim, tag)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient: Tensor = _Border.apply(gradients[0], *ctx.conjugate)  # type: ignore[no-untyped-call]
        return gradient, None, None, None, None, None


def _same(tensor: Tensor, *_: object) -> Tensor:
    return tensor.view_as(tensor)


def _summed(tensor: Tensor, comm: Communicator, _dim: int, tag: str) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # autograd may have saved the tensor for backward
    comm.all_reduce(total, tag=tag).wait()
    return total


def _own_part(tensor: Tensor, comm: Communicator, dim: int, tag: str) -> Tensor:
    require_divisible(f"dim {dim} of {tag or 'the tensor'}", tensor.shape[dim], comm.num_ranks)
    # A copy, or the part would keep the whole alive.
    return tensor.chunk(comm.num_ranks, dim)[comm.rank].clone(memory_format=torch.contiguous_format)


def _gathered(tensor: Tensor, comm: Communicator, dim: int, tag: str) -> Tensor:
    # Rank-major is already the order of dim 0; any other dim needs a copy. No view is returned: torch refuses writes in
    # place into a view that an autograd function has made.
    whole = tensor.new_empty((comm.num_ranks * tensor.shape[0], *tensor.shape[1:]))
    comm.all_gather(whole.view(-1), tensor.reshape(-1), tag=tag).wait()
    return whole if dim in (0, -tensor.dim()) else torch.cat(whole.chunk(comm.num_ranks), dim)


def _summed_part(tensor: Tensor, comm: Communicator, dim: int, tag: str) -> Tensor:
    require_divisible(f"dim {dim} of {tag or 'the tensor'}", tensor.shape[dim], comm.num_ranks)
    parts = torch.stack(tensor.chunk(comm.num_ranks, dim)) if dim not in (0, -tensor.dim()) else tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] //= comm.num_ranks
    output = tensor.new_empty(shape)
    comm.reduce_scatter(parts.view(-1), output.view(-1), tag=tag).wait()
    return output


def _exchanged(tensor: Tensor, comm: Communicator, _dim: int, tag: str) -> Tensor:
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    # Contiguous, not reshaped: a gradient that sum() has expanded is one element in a row of strides of 0.
    comm.all_to_all(output.view(-1), tensor.contiguous().view(-1), tag=tag).wait()
    return output


HopAct = Callable[[Hop, Tensor], Tensor]


@untraced
def _hop(tensor: Tensor, hop: Hop, there: HopAct, back: HopAct) -> Tensor:
    moved: Tensor = _HopBorder.apply(tensor, hop, there, back)  # type: ignore[no-untyped-call]
    return moved


class _HopBorder(torch.autograd.Function):
    """One end of a hop. The backward of its end begins that of the gradient, whose end is the backward of its begin.

    Autograd runs backward in the opposite order of forward, and so in between what was computed in between.
    """

    runs_no_backward = True  # for engines that ask what a backward will reach

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, hop: Hop, there: HopAct, back: HopAct) -> Tensor:
        ctx.conjugate = (hop, back, there)
        return there(hop, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hop, there, back = ctx.conjugate
        gradient: Tensor = _HopBorder.apply(gradients[0], hop.back, there, back)  # type: ignore[no-untyped-call]
        return gradient, None, None, None
