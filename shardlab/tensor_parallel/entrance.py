"""Where an activation enters a parallel region: the border that all columns given the same tensor cross together.

Query, key and value projections read one tensor. Would each of them copy (or gather) it for itself, backward had three
all-reduces where one does. So the columns of one parent share an ``Entrance``, which remembers the last tensor that
crossed, until the parent's forward ends. It goes by identity: another tensor crosses for itself, so nothing is ever
mistaken, only sent once more.
"""

import torch
from torch import Tensor, nn

from shardlab.comm import Communicator
from shardlab.comm.autograd import all_gather, copy


class Entrance:
    """The border before one or more column-parallel layers.

    Args:
        comm: the tensor axis.
        sequence_dim: the dim along which the tensor is in parts outside; None where it is whole there.
        name: whose input it is, in the tags.
    """

    def __init__(self, comm: Communicator, sequence_dim: int | None, name: str) -> None:
        self.comm, self.sequence_dim, self.name = comm, sequence_dim, name
        self._last: tuple[Tensor, int, bool, Tensor] | None = None
        self._again: tuple[Tensor, Tensor] | None = None
        self._is_shared = False

    def share(self, parent: nn.Module) -> None:
        """Remember what crosses for the other columns of ``parent``, until its forward ends."""
        self._is_shared = True
        parent.register_forward_hook(lambda *_: self._forget(), always_call=True)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor as the columns take it: whole, its gradient summed over the ranks."""
        if not self._is_shared or tensor.is_inference():
            return self._cross(tensor)
        as_it_is = (tensor, tensor._version, torch.is_grad_enabled())  # the version says whether it was written into
        if self._last is None or self._last[0] is not tensor or self._last[1:3] != as_it_is[1:]:
            self._last = (*as_it_is, self._cross(tensor))
        return self._last[3]

    def again(self, part: Tensor, *, for_all: bool) -> Tensor:
        """Gather once more, in backward, what ``part`` became.

        Args:
            part: this rank's part.
            for_all: remember it for the other columns, until the gradient of the whole is there.
        """
        if self._again is not None and self._again[0].data_ptr() == part.data_ptr():
            return self._again[1]
        assert self.sequence_dim is not None
        whole = all_gather(part, self.comm, self.sequence_dim, tag=f"input of {self.name} again")
        if self._is_shared and for_all:
            self._again = (part, whole)
        return whole

    def _cross(self, tensor: Tensor) -> Tensor:
        tag = f"input of {self.name}"
        if self.sequence_dim is None:
            return copy(tensor, self.comm, tag=tag)
        crossed = all_gather(tensor, self.comm, self.sequence_dim, tag=tag)
        if crossed.requires_grad:
            crossed.register_hook(lambda _: self._forget_again())  # its gradient is there: all columns are through
        return crossed

    def _forget(self) -> None:
        self._last = None

    def _forget_again(self) -> None:
        self._again = None
