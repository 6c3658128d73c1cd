"""From the first backward to ``zero_grad()``: when gradients become means, and what happens if a backward fails.

The states of the gradients, and what moves them from one to the next:

====================  ==============================================================  ====================
are                   when                                                            become
====================  ==============================================================  ====================
none                  a backward                                                      means
none                  a backward inside ``no_sync()``                                 local sums
local sums            a backward, ``step()``, clipping, ``finish_gradients()``        means
means                 a backward                                                      means, added up
means                 a backward inside ``no_sync()``                                 means and local sums
means and local sums  as for local sums                                               means
any                   a backward outside ``no_sync()`` that raises                    failed
any, also failed      ``zero_grad()``                                                 none, or means of 0
====================  ==============================================================  ====================

A backward that raises leaves its rank with part of the gradients, and perhaps other ranks waiting for the rest. Nothing
is sent at that moment, since the other ranks may have raised too. ``zero_grad()``, called on all ranks, completes the
collectives that have begun and drops their results. A rank that has not raised learns of it by what the others send
then (on a GPU it does not), and raises at the end of the same backward.
"""

import contextlib
from collections.abc import Iterator
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from shardlab.comm.communicator import Communicator
from shardlab.engines.agreement import number_among
from shardlab.engines.backward_watch import BackwardWatch
from shardlab.engines.step_tensors import StepTensors
from shardlab.engines.unused_params import failed, failed_rank
from shardlab.partition.slices import TensorSlice

_CHANGED_SUM = (
    "it was changed in place after a backward inside no_sync(), when it was this rank's own sum and not yet the mean; "
    "call engine.zero_grad(), and from then on write engine.clip_grad_norm_(max_norm), or engine.finish_gradients() "
    "before what changes gradients"
)
_REPLACED_SUM = (
    "it was cleared or replaced after a backward inside no_sync(), but the mean of an earlier backward, to which it is "
    "added, is in engine.step_tensors(); write engine.zero_grad()"
)
_CHANGED_MEAN = (
    "it was changed in place, and it is a slice: torch's clip_grad_norm_ would scale it by a different norm on each "
    "tensor rank; call engine.zero_grad(), and from then on write engine.clip_grad_norm_(max_norm), or assign a "
    "new tensor where each element is changed by itself, as in param.grad = param.grad.clamp(-1, 1)"
)


class Gradients:
    """The part of ``Engine`` that makes gradients."""

    name: ClassVar[str]
    params: dict[str, nn.Parameter]
    slices: dict[str, TensorSlice]
    data_comms: tuple[Communicator, ...]
    comm: Communicator
    _step_tensors: StepTensors
    _is_closed = False

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks that gradients are averaged over, each with its own rows."""
        return prod(comm.num_ranks for comm in self.data_comms)

    @property
    def comms(self) -> tuple[Communicator, ...]:
        """All axes whose ranks train this model together."""
        raise NotImplementedError

    def __init__(self) -> None:
        self._sync = True  # not inside no_sync()
        # The last backward, whose error may be noticed when no_sync() has been left; None if it was refused.
        self._began_in_sync: bool | None = None
        self._are_means = False  # the gradients, over the data axes
        self._has_failed = False  # a backward outside no_sync() raised, and zero_grad() has not been called since
        self._failed_elsewhere = ""  # likewise on another rank, whose part these means lack: what to say
        self._trained: set[nn.Parameter] = set()  # when the last backward began, or was refused
        self._were_trainable: set[nn.Parameter] = set()  # in a backward since zero_grad(); may be frozen by now
        # Gradients that the user may not change in place, and their versions: what no_sync() has left, means of slices.
        self._guarded: dict[nn.Parameter, tuple[TensorWeakRef, int]] = {}
        self._pieces_have_means = False  # means of an earlier backward are at the pieces, and sums are added to them
        self.num_backwards = 0  # begun so far
        self._backward_watch = BackwardWatch(
            self.params, self._try_to_begin, self._enter_backward, self._on_gradient, self._end_backward
        )

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of ``loss``, averaged over the data axis unless inside ``no_sync()``.

        Args:
            loss: of this rank's rows.
            retain_graph: keep the graph, so that another backward through it can add its gradients.

        Raises:
            RuntimeError: the previous backward outside ``no_sync()`` raised, and ``zero_grad()`` was not called since.
        """
        with self._backward_watch.expected(loss, retain_graph=retain_graph):
            try:
                loss.backward(retain_graph=retain_graph)
            except BaseException:
                # Send nothing here: the other ranks may have raised elsewhere, and would never join the collective.
                self._has_failed |= self._sync
                self._clean_up_backward()
                if not self._sync:
                    self._note_local()
                raise
        # Only here: inside the block this backward still counts as begun, and would be taken for one that raised.
        self._end_backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates on this rank; the next backward outside communicates the sum.

        Until then, where parameters are whole, ``param.grad`` is this rank's own sum, which you may read, clear, or
        replace by a tensor of yours. A change in place is refused, if not at once then by what needs the gradients
        next: torch's ``clip_grad_norm_`` would scale each rank's sum by another norm. ``engine.clip_grad_norm_``
        communicates first.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish_gradients(self) -> None:
        """Return when the gradients are means over the data axis; clip and step call it if that is still pending.

        Raises:
            RuntimeError: the last backward outside ``no_sync()`` raised, or what ``no_sync()`` has left, or a mean of
                slices, was changed in place, and ``zero_grad()`` has not been called since.
        """
        self._refuse_after_failure()
        self._refuse_changes(others_wait=not self._are_means)
        if not self._are_means:
            self._reduce_gradients()
            self._are_means = True
            self._forget_guarded()
            self.guard_slices()
            if self.num_data_ranks > 1:
                self._refuse_fillers()

    def guard_slices(self) -> None:
        """From now on refuse changes in place of the means of slices; code that may change them calls this after it.

        Torch's ``clip_grad_norm_`` would scale what each tensor rank has by the norm of that alone. The next step ends
        the refusal.
        """
        if not self._are_means:
            return  # or changed sums would be taken for right ones
        for name in self.slices.keys() & self.params.keys():  # tied weights are slices under each of their names
            param = self.params[name]
            # Those that the user sees. Where means go elsewhere, a placeholder stands here and refuses by itself.
            if self.slices[name].num_ranks > 1 and not self._mean_is_at_piece(name):
                self._guard(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            set_to_none: False keeps zeros where there were gradients, as in torch: the next step then moves these
                parameters too, by momentum and weight decay. Pending reductions are finished first: collective.
        """
        self._notice_failure()
        self._failed_elsewhere = ""
        self._guarded.clear()  # what was changed in them is dropped
        # Before anything is cleared: other ranks may be waiting in collectives of the backward that raised here.
        if self._has_failed:
            self._complete_failed_backward()
        if set_to_none:
            self._forget_gradients()
            return
        # First: a pending reduction would write its means over the zeros.
        self.finish_gradients()
        for tensor in self._step_tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()
        self.guard_slices()

    def _reduce_gradients(self) -> None:
        """The strategy's reduction to means over the data axes; called equally often on all ranks."""

    def _forget_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None
        self._were_trainable.clear()
        self._are_means = self._pieces_have_means = False
        self._forget_guarded()

    def _try_to_begin(self, first_param: nn.Parameter | None) -> None:
        if first_param is not None:
            # Nobody saw this plain backward begin, and autograd has changed the first gradient itself.
            self._guarded.pop(first_param, None)
        # If the previous backward raised, what is overwritten here still says whether it was inside no_sync().
        self._notice_failure()
        # Noted even if this rank refuses: the others have begun, and they send what trains now. But after a backward
        # that failed here they are still in that one.
        if not self._has_failed:
            self._trained = {param for param in self.params.values() if param.requires_grad}
        self._began_in_sync = None
        self._begin_backward()  # may refuse
        self._began_in_sync = self._sync

    def _begin_backward(self) -> None:
        """A backward begins; called before its first gradient, or right after it (see ``BackwardWatch``)."""
        self._refuse_after_failure()
        self._refuse_changes(others_wait=self._sync)
        self._forget_guarded()  # autograd changes them now
        self._backward_watch.run_hooks_last()
        self.num_backwards += 1
        # Not after a step without a backward: it finishes gradients too, and there were none.
        were_means = self._are_means and bool(self._were_trainable)
        self._pieces_have_means |= were_means and any(map(self._mean_is_at_piece, self.params))
        # Noted on every rank: a parameter frozen before the reduction still has a gradient to send, here or elsewhere.
        self._were_trainable.update(self._trained)
        self._are_means = False

    def _enter_backward(self) -> None:
        """Autograd runs the backward now, so it can be asked which parameters it reaches."""
        return

    def _is_due(self, param: nn.Parameter) -> bool:
        """Whether any rank may have a gradient of it; the same answer on all ranks."""
        return param.requires_grad or param in self._were_trainable

    def _on_gradient(self, param: nn.Parameter) -> None:
        """A gradient has been accumulated into ``param.grad``."""
        gradient = param.grad
        if gradient is not None and gradient.is_sparse and self.comm.num_ranks > 1:
            raise ValueError(
                f"model: parameter {self._name_of(param)!r} has a sparse gradient, which strategy {self.name!r} cannot "
                "average; build the embedding with sparse=False"
            )

    def _end_backward(self) -> None:
        """A backward has ended."""
        try:
            if self._sync:
                self.finish_gradients()
        finally:
            self._clean_up_backward()  # after an error too, or the next forward would count as one inside this backward
        if not self._sync:
            self._note_local()

    def _clean_up_backward(self) -> None:
        """Undo what a backward needed, after its end or an error; communicates nothing."""
        return

    def _note_local(self) -> None:
        """A backward inside ``no_sync()`` has ended: until they are means, no gradients of this rank may be changed."""
        self._step_tensors.are_behind = True
        several = any(comm.num_ranks > 1 for comm in self.comms)
        for name, param in self.params.items():
            # One process alone may change its sums, which are the means, unless earlier means lie elsewhere.
            if several or self._mean_is_at_piece(name):
                self._guard(param)

    def _guard(self, param: nn.Parameter) -> None:
        if param.grad is not None:
            # Weakly: a gradient that the user clears must not stay in memory.
            self._guarded[param] = TensorWeakRef(param.grad), param.grad._version

    def _forget_guarded(self) -> None:
        self._guarded.clear()
        self._step_tensors.are_behind = False

    def _refuse_changes(self, *, others_wait: bool) -> None:
        """Refuse what may have been changed on each rank in its own way.

        A rank where nothing was changed refuses nothing, and may be in a reduction of gradients (``others_wait``),
        which ``zero_grad()`` then joins. No other collective is joined: not that of a norm, for example.
        """
        for param, (reference, version) in self._guarded.items():
            gradient = param.grad
            if gradient is None or gradient is not reference():
                if not self._pieces_have_means:
                    continue
                what = _REPLACED_SUM
            elif gradient._version == version:
                continue
            else:
                what = _CHANGED_MEAN if self._are_means else _CHANGED_SUM
            self._has_failed |= others_wait
            raise RuntimeError(f"gradient of {self._name_of(param)!r}: {what}")

    def _notice_failure(self) -> None:
        """Find out whether a plain ``loss.backward()`` raised."""
        if self._backward_watch.take_unended():
            self._has_failed |= self._began_in_sync is True
            self._clean_up_backward()
            if self._began_in_sync is False:
                self._note_local()

    def _before_forward(self) -> None:
        self._refuse_closed()
        self._notice_failure()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"engine: {self.name} was closed, by close() or by the end of its 'with' block, and its module is "
                "plain; build another engine, or use the module itself"
            )

    def _refuse_after_failure(self) -> None:
        self._refuse_closed()
        self._notice_failure()
        if self._has_failed:
            raise RuntimeError(
                "gradients: the last backward raised an exception and left them incomplete; call engine.zero_grad() on "
                "all ranks before the next forward"
            )
        if self._failed_elsewhere:
            raise RuntimeError(self._failed_elsewhere)

    def _refuse_fillers(self) -> None:
        """Refuse means without the part of a rank whose backward has raised, and which has called ``zero_grad()``."""
        rank = failed_rank(tensor.grad for _, tensor in self._step_tensors.items())
        if rank is not None:
            self._failed_elsewhere = (
                f"gradients: data rank {rank} raised an exception before its part was sent, so these means are "
                "incomplete; call engine.zero_grad() on all ranks, and leave out this step"
            )
            raise RuntimeError(self._failed_elsewhere)

    def _complete_failed_backward(self) -> None:
        """Join the collectives that the other ranks have begun since this rank's backward raised.

        This rank sends NaN for all that it has not sent, so that no other rank takes a sum without its part for a mean.
        """
        with self._training(self._trained):
            self._send_fillers()
        # Else ``finish_gradients()``, which ``zero_grad(set_to_none=False)`` calls next, would refuse, or send again.
        self._are_means, self._has_failed = True, False
        self._forget_guarded()

    @contextlib.contextmanager
    def _training(self, trained: set[nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters are trainable, and no others."""
        changed = [param for param in self.params.values() if param.requires_grad is not (param in trained)]
        for param in changed:
            param.requires_grad_(param in trained)
        try:
            yield
        finally:
            for param in changed:
                param.requires_grad_(param not in trained)

    def _send_fillers(self) -> None:
        fillers = {name: self._filler(name) for name, param in self.params.items() if param.requires_grad}
        for name, filler in fillers.items():
            self.params[name].grad = filler
        self._reduce_gradients()
        for name, filler in fillers.items():
            param = self.params[name]
            # Where means go elsewhere, a filler that is still here was not sent: its bucket had been sent before.
            if self._mean_is_at_piece(name) and param.grad is filler:
                param.grad = None

    def _filler(self, name: str) -> Tensor:
        """A gradient of NaN; where it is only read, of one element for all, since memory may be what has run out."""
        param = self.params[name]
        filler = failed(number_among(self.data_comms)[0], param.dtype, param.device).expand(param.shape)
        return filler if self._mean_is_at_piece(name) else torch.empty_like(param).copy_(filler)

    def _mean_is_at_piece(self, name: str) -> bool:
        """Whether the mean is not ``param.grad``, but the gradient of the piece that this rank steps."""
        return self._step_tensors.by_name(name) is not self.params[name]

    def _name_of(self, param: nn.Parameter) -> str:
        return next(name for name, known in self.params.items() if known is param)

    def _watch_params(self) -> None:
        """From now on notice the gradients of the parameters."""
        self._backward_watch.watch_params()
