"""``watch``: the same comparison inside a loop of one's own, in a cell or in a script that cannot be run twice.

    with shardlab.same.watch(model, optimizer) as watched:      # on all ranks
        train(model, optimizer)
    print(watched.answer)

Before each backward the gradient of this rank's own rows is taken from the graph, where nobody reduces it yet; their
mean over the ranks is what one process has. So only a gradient is compared, not what the optimizer makes of it, and
only where each rank holds whole parameters.
"""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.comm.signed_messages import all_gather_bytes
from shardlab.same.answer import Answer, answer
from shardlab.same.capture import Capture
from shardlab.same.notes import Notes
from shardlab.same.pieces import Pieces, part_of, plain_name
from shardlab.same.rows import Rows


class Watched(Capture):
    """A loop that is watched.

    Args:
        model: that trains.
        optimizer: that steps it.
        limit: steps that are noted.
    """

    answer: Answer
    """When the block has ended."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: int) -> None:
        notes = Notes()
        super().__init__(Rows(notes, float64=False), notes, rank=0, limit=limit, dropout=True)
        self._number(model)
        self._optimizers.append(optimizer)
        self._own: list[dict[str, Tensor]] = []  # of each backward since the last step
        self._locals: list[list[dict[str, Tensor]]] = []  # by step

    def notes_of_one(self) -> Notes:
        """What one process has on this rank's rows."""
        notes = copy.deepcopy(self.notes)
        for step, own in zip(notes.steps, self._locals, strict=True):
            whole: dict[str, Tensor] = {}
            for backward, brought in zip(step.backwards, own, strict=True):
                backward.brought = [part_of(name, value) for name, value in brought.items()]
                zero = torch.zeros(())
                names = whole.keys() | brought.keys()
                whole = {name: whole.get(name, zero) + brought.get(name, zero) for name in names}
            step.gradients = step.stepped = [part_of(name, value) for name, value in whole.items()]
            step.after = []  # what one process would have made of them is not known
        return notes

    def _around_backward(self, plain: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_in_backward and isinstance(tensors, Tensor) and len(self.notes.steps) < self._limit:
            named = self.pieces[0].module.named_parameters()
            wanted = {plain_name(name): param for name, param in named if param.requires_grad}
            found = torch.autograd.grad(tensors, list(wanted.values()), retain_graph=True, allow_unused=True)
            both = zip(wanted, found, strict=True)
            self._own.append({name: one.detach().clone().cpu() for name, one in both if one is not None})
        super()._around_backward(plain, tensors, *args, **kwargs)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._stepping and optimizer is not self._optimizers[0]:
            raise ValueError("watch: another optimizer steps inside the block; 'shardlab same' judges several")
        super()._before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        super()._after_step(optimizer, *rest)
        if len(self.notes.steps) > self._limit:
            del self.notes.steps[self._limit :]
        elif len(self.notes.steps) > len(self._locals):
            self._locals.append(self._own)
            self._own = []

    def refuse(self, why: str) -> NoReturn:
        """In the loop's own words: it goes no further than that line."""
        raise ValueError(f"watch: {why}")

    def _end_if_enough(self) -> None:
        return  # the loop goes on

    @contextlib.contextmanager
    def _noise(self, number: int) -> Iterator[None]:
        yield


@contextlib.contextmanager
def watch(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> Iterator[Watched]:
    """Compare the gradients of a loop on all ranks with those of one process; see above.

    Twice the time and memory of a backward while steps are noted; numbers and messages of the loop stay as they are. At
    the end of the block all ranks exchange what they have noted: collective.

    Args:
        model: plain, or inside DistributedDataParallel, of which each rank holds all.
        optimizer: that steps its parameters.
        steps: how many are noted.

    Yields:
        What is watched; its ``answer`` is there after the block.

    Raises:
        ValueError: ranks hold pieces of parameters, or hooks stand on them, the optimizer steps others, there is no
            group of several ranks, or ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps: {steps} is given; it must be 1 or more")
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError("watch: there is no group of two ranks or more, so nothing to compare one process with")
    pieces = Pieces(model)
    if not all(part.is_whole for part in pieces.weights()):
        raise ValueError("model: each rank holds pieces of its parameters; run the script by 'shardlab same' instead")
    if any(param._backward_hooks for param in pieces.module.parameters()):
        raise ValueError("model: hooks stand on its parameters, which would send twice; use 'shardlab same' instead")
    known = pieces.names
    if not any(id(one) in known for group in optimizer.param_groups for one in group["params"]):
        raise ValueError("optimizer: it steps no parameter of the model; give the one that does")
    watched = Watched(model, optimizer, steps)
    with watched.listening():
        yield watched
    watched.finish()
    told = all_gather_bytes(pickle.dumps((watched.notes, watched.notes_of_one())))
    notes = [pickle.loads(one) for one in told]
    watched.answer = answer([one for one, _ in notes], [other for _, other in notes])
