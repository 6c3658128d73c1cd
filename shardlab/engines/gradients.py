"""From the first backward to ``zero_grad()``: when gradients become means, and what happens where a backward fails.

A backward that raises leaves a rank with a part of its gradients, and the others perhaps waiting for the rest. Nothing
is sent then, since they may never come; ``zero_grad()``, on all ranks, completes what they wait for and forgets it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm.communicator import Communicator
from shardlab.engines.backward_watch import BackwardWatch
from shardlab.engines.step_tensors import StepTensors


class Gradients:
    """The part of ``Engine`` that makes gradients."""

    name: ClassVar[str]
    params: dict[str, nn.Parameter]
    comm: Communicator
    _step_tensors: StepTensors

    def __init__(self) -> None:
        self._sync = True  # not inside no_sync()
        self._are_means = False  # the gradients, over the data axes
        self._has_failed = False  # a backward outside no_sync() has raised, and zero_grad() has not been called since
        self._were_trainable: set[nn.Parameter] = set()  # in a backward since zero_grad(); perhaps frozen by now
        self._backward_watch = BackwardWatch(self.params, self._begin_backward, self._end_backward)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of ``loss``, averaged over the data axis unless inside ``no_sync()``.

        Args:
            loss: of this rank's rows.
            retain_graph: keep what another backward through the same forward needs; its gradients are added.

        Raises:
            RuntimeError: the backward before this one raised, and ``zero_grad()`` has not been called since.
        """
        with self._backward_watch.expected(loss):
            try:
                loss.backward(retain_graph=retain_graph)
            except BaseException:
                self._has_failed |= self._sync
                self._leave_backward()
                raise
        self._end_backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates on this rank; the next backward outside communicates the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish_gradients(self) -> None:
        """Return when the gradients are means over the data axis. Called by clip and step where it is still due.

        Raises:
            RuntimeError: the last backward raised, and ``zero_grad()`` has not been called since.
        """
        self._refuse_after_failure()
        if not self._are_means:
            self._finish_gradients()
            self._are_means = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients.

        Args:
            set_to_none: False keeps them as zeros where there were some, as in torch: the next step then moves these
                parameters too, by momentum and weight decay. What is pending is finished first, which is collective.
        """
        self._notice_failure()
        if self._has_failed:
            self._complete_failed_backward()
        if set_to_none:
            self._forget_gradients()
            return
        self.finish_gradients()
        for tensor in self._step_tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()

    def _finish_gradients(self) -> None:
        """Make the gradients means over the data axes. Every rank calls it equally often. In one process they are."""

    def _forget_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None
        self._were_trainable.clear()
        self._are_means = False

    def _begin_backward(self) -> None:
        """A backward begins; called before its first gradient has been accumulated."""
        self._refuse_after_failure()
        self._were_trainable.update(param for param in self.params.values() if param.requires_grad)
        self._are_means = False

    def _is_due(self, param: nn.Parameter) -> bool:
        """Whether some rank may have a gradient of it, the same on all ranks."""
        return param.requires_grad or param in self._were_trainable

    def _on_gradient(self, param: nn.Parameter) -> None:
        """A gradient has been accumulated into ``param.grad``."""
        self._backward_watch.enter()
        gradient = param.grad
        if gradient is not None and gradient.is_sparse and self.comm.num_ranks > 1:
            raise ValueError(
                f"model: parameter {self._name_of(param)!r} has a sparse gradient, which strategy {self.name!r} cannot "
                "average; build the embedding with sparse=False"
            )

    def _end_backward(self) -> None:
        """A backward has ended."""
        if self._sync:
            self.finish_gradients()
        self._leave_backward()

    def _leave_backward(self) -> None:
        """A backward has ended or raised; communicates nothing."""
        return

    def _notice_failure(self) -> None:
        """Find out whether a plain ``loss.backward()`` has raised."""
        if self._backward_watch.take_unended():
            self._has_failed |= self._sync
            self._leave_backward()

    def _refuse_after_failure(self) -> None:
        self._notice_failure()
        if self._has_failed:
            raise RuntimeError(
                "gradients: the last backward raised an exception, so they are incomplete; call engine.zero_grad() on "
                "all ranks before the next backward"
            )

    def _complete_failed_backward(self) -> None:
        """Take part in what the other ranks have sent or wait for since this rank's backward raised.

        A rank whose backward did not raise must not take the sum without this rank's part for a mean: it gets NaN.
        """
        fillers = {
            name: torch.full_like(param, torch.nan) for name, param in self.params.items() if param.requires_grad
        }
        for name, filler in fillers.items():
            self.params[name].grad = filler
        self._finish_gradients()
        for name, filler in fillers.items():
            param = self.params[name]
            # Where means go to pieces, a filler that stayed was sent before the error, so it took no part.
            if self._step_tensors.by_name(name) is not param and param.grad is filler:
                param.grad = None
        self._are_means, self._has_failed = True, False

    def _name_of(self, param: nn.Parameter) -> str:
        return next(name for name, known in self.params.items() if known is param)

    def _watch(self, param: nn.Parameter) -> RemovableHandle | None:
        if not param.is_floating_point():
            return None
        # A frozen parameter may be thawed later, but torch takes the hook only while it requires a gradient.
        frozen = not param.requires_grad
        param.requires_grad_(True)
        hook: RemovableHandle = param.register_post_accumulate_grad_hook(_weakly(self))
        param.requires_grad_(not frozen)
        return hook


def _weakly(engine: Gradients) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its engine, for torch holds hooks where Python cannot look for cycles.

    The engine lives as long as the module it wraps; who then still uses a parameter trains alone, as after ``close()``.
    """
    reference = weakref.ref(engine)

    def on_gradient(param: nn.Parameter) -> None:
        if (known := reference()) is not None:
            known._on_gradient(param)

    return on_gradient
