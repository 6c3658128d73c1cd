"""The one interface of every strategy; what differs between two of them is in their own files.

    engine = Bucketed(model, lambda tensors: torch.optim.AdamW(tensors, lr=3e-4), mesh)
    loss = engine(x, y)
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()
    engine.zero_grad()

The module keeps its class, its parameter names and its buffers; any torch optimizer works. A copy of the module
(``copy.deepcopy``, pickle) is a plain one, without the engine. Gradients are means over the ranks of the data axis.
``loss.backward()`` instead of ``engine.backward(loss)`` is right too: the engine notices it and finishes the gradients
at its end.

A backward that raises leaves a rank with a part of its gradients, and the others perhaps waiting for the rest. Nothing
is sent then, since they may never come; ``zero_grad()``, on all ranks, completes what they wait for and forgets it.
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm import BaseMesh, Communicator, broadcast_coalesced
from shardlab.engines.backward_watch import BackwardWatch
from shardlab.engines.checks import check_max_norm, check_no_meta, check_optimizer, check_optimizer_fn, check_params
from shardlab.engines.claims import Claim, check_free
from shardlab.engines.clip import clip_
from shardlab.engines.copied import OfThisModule
from shardlab.engines.engine_holdings import EngineHoldings
from shardlab.engines.looks_at import Stepped
from shardlab.engines.optimizer_fit import check_sliced
from shardlab.engines.redirect import forward_is
from shardlab.engines.state import EngineState
from shardlab.engines.step_tensors import StepTensors
from shardlab.engines.tensor_axis import tensor_axis
from shardlab.partition.slices import slices_of
from shardlab.vocabulary import MeshAxis

OptimizerFn = Callable[[StepTensors], torch.optim.Optimizer]
_WRAPPED = "_shardlab_engine"


class Engine(EngineHoldings, EngineState, ABC):
    """A strategy around a plain module.

    Args:
        model: an ``nn.Module`` on its device. Parameters and buffers become those of the data axis' first rank.
        optimizer_fn: makes the optimizer from the tensors this rank steps (``StepTensors``).
        mesh: its axis ``data`` is averaged over; None for this process alone. A tensor-parallel model needs the axis
            ``tensor`` too, over which it was made so.

    Raises:
        ValueError: an engine wraps the module already, or a part of it, or something around it, or a module that shares
            a parameter with it; it has no parameters; or the mesh has no axis ``data``.
    """

    name: ClassVar[str]

    def __init__(self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None) -> None:
        check_free(model)
        check_optimizer_fn(optimizer_fn)
        self.module = model
        self.mesh = BaseMesh.alone() if mesh is None else mesh
        self.data_comms = self._data_axes()
        self.comm = self.data_comms[-1]
        self.slices = slices_of(model)  # of a tensor-parallel model, by parameter name
        self.tensor_comm = self._tensor_axis()
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())  # tied weights appear once
        check_params(self.params, self.mesh.device)
        check_max_norm(model, self.num_data_ranks)
        self._check_meta()
        self.num_steps = 0
        self.loss_is_scaled = False  # a GradScaler has said so
        self._sync = True
        self._are_means = False  # the gradients, over the data axis
        self._has_failed = False  # a backward outside no_sync() has raised, and zero_grad() has not been called since
        self._were_trainable: set[nn.Parameter] = set()  # in a backward since zero_grad(); perhaps frozen by now
        self._backward_watch = BackwardWatch(self.params, self._begin_backward, self._end_backward)
        self._equalise(
            [*(param for param in self.params.values() if not param.is_meta), *model.buffers()],
            "parameters and buffers from rank 0",
        )
        self._prepare()
        self.optimizer = self._make_optimizer(optimizer_fn)
        self._check_optimizer()
        self._hooks = [hook for param in self.params.values() if (hook := self._watch(param)) is not None]
        self._claim = Claim(self)
        object.__setattr__(model, _WRAPPED, OfThisModule(self, None))

    @property
    def num_data_ranks(self) -> int:
        """Ranks the gradients are averaged over, each with rows of its own."""
        return prod(comm.num_ranks for comm in self.data_comms)

    @property
    def data_rank(self) -> int:
        """This rank's number among them, from 0."""
        number = 0
        for comm in self.data_comms:
            number = number * comm.num_ranks + comm.rank
        return number

    @property
    def comms(self) -> tuple[Communicator, ...]:
        """All axes whose ranks train this model together: the data axes, outer first, then the tensor axis."""
        return self.data_comms if self.tensor_comm is None else (*self.data_comms, self.tensor_comm)

    def mean_over_ranks(self, value: Tensor, *, tag: str) -> Tensor:
        """The mean of a tensor over all data ranks, in place; blocking."""
        for comm in self.data_comms:
            comm.all_reduce(value, tag=tag).wait()
        return value.div_(self.num_data_ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self._notice_failure()
        output = self.module(*args, **kwargs)
        self._backward_watch.follow(output)
        return output

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` as if it were the module's forward: ``engine.call(model.encode, x)``.

        A method of the module beside ``forward``, or any function that computes with the module, also by calling it.
        Parameters are there, hooks run and ``backward`` works as with ``engine(x)``. FSDP gathers the root's parameters
        around it, and those of another unit only around that unit's own forward.

        Args:
            function: what to call.
            args: its arguments.
            kwargs: its arguments by name.

        Raises:
            ValueError: ``function`` cannot be called.
        """
        with forward_is(self.module, function):
            return self(*args, **kwargs)

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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Args:
            max_norm: greater than 0.
            norm_type: 1, 2 or inf.

        Returns:
            The norm before clipping, 0-d, equal on all ranks.
        """
        self.finish_gradients()
        tensors: dict[tuple[Communicator, ...], list[Tensor]] = {}
        for name, axes in self.spread_over().items():
            tensors.setdefault(axes, []).append(self.step_tensors().by_name(name))
        return clip_(tensors, max_norm, norm_type, self.mesh.device)

    def step(self) -> None:
        """One optimizer step; afterwards the parameters are equal on all ranks."""
        self.finish_gradients()
        with self.stepping(), self._claim.stepping():
            self.optimizer.step()
        self.num_steps += 1

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
        for tensor in self.step_tensors():
            if tensor.grad is not None:
                tensor.grad.zero_()

    def _forget_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None
        self._were_trainable.clear()
        self._are_means = False

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group; setting it sets all groups."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``step_tensors()`` are where the optimizer keeps its state."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Take the hooks off: the module trains alone again. Called twice it does nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._claim.release()
        object.__setattr__(self.module, _WRAPPED, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        self.close()

    def _data_axes(self) -> tuple[Communicator, ...]:
        """The axes of the mesh to average over, outer first."""
        return (self.mesh[MeshAxis.DATA],)

    def _tensor_axis(self) -> Communicator | None:
        """The axis the model is sliced over."""
        return tensor_axis(self.mesh, self.slices)

    def _check_meta(self) -> None:
        """Refuse parameters without memory, unless the strategy can make them."""
        check_no_meta(self.params)

    def _equalise(self, tensors: list[Tensor], tag: str) -> None:
        """Make tensors those of the first data rank, in place."""
        for comm in reversed(self.data_comms):
            broadcast_coalesced(comm, tensors, tag=tag)

    def _begin_backward(self) -> None:
        """A backward begins; called before its first gradient has been accumulated."""
        self._refuse_after_failure()
        self._were_trainable.update(param for param in self.params.values() if param.requires_grad)
        self._are_means = False

    def _is_due(self, param: nn.Parameter) -> bool:
        """Whether some rank may have a gradient of it, the same on all ranks."""
        return param.requires_grad or param in self._were_trainable

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
        fillers = {param: torch.full_like(param, torch.nan) for param in self.params.values() if param.requires_grad}
        for param, filler in fillers.items():
            param.grad = filler
        self._finish_gradients()
        for param, filler in fillers.items():
            if self.shards_gradients and param.grad is filler:  # sent before the error, so it took no part
                param.grad = None
        self._are_means, self._has_failed = True, False

    def _prepare(self) -> None:
        """Lay out what the strategy needs, before the optimizer is made."""
        return

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        """The optimizer, or a refusal of one that the division of the parameters makes wrong."""
        optimizer = optimizer_fn(self.step_tensors())
        check_optimizer(optimizer, self.step_tensors())
        if self.slices:
            check_sliced(optimizer, self._stepped(), self.slices)
        return optimizer

    def _stepped(self) -> Stepped:
        """What the optimizer steps."""
        shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        with self.stepping():
            return Stepped(self.step_tensors(), shapes, self.step_tensors()[0].device)

    def _check_optimizer(self) -> None:
        """Refuse an optimizer the strategy cannot bear, before hooks are on the module."""
        return

    @abstractmethod
    def _finish_gradients(self) -> None:
        """Make the gradients means over the data axis. Every rank calls it equally often."""

    def _on_gradient(self, param: nn.Parameter) -> None:
        """A gradient has been accumulated into ``param.grad``."""
        self._backward_watch.enter()
        gradient = param.grad
        if gradient is not None and gradient.is_sparse and self.comm.num_ranks > 1:
            raise ValueError(
                f"model: parameter {self._name_of(param)!r} has a sparse gradient, which strategy {self.name!r} cannot "
                "average; build the embedding with sparse=False"
            )

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


def _weakly(engine: Engine) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its engine, for torch holds hooks where Python cannot look for cycles.

    The engine lives as long as the module it wraps; who then still uses a parameter trains alone, as after ``close()``.
    """
    reference = weakref.ref(engine)

    def on_gradient(param: nn.Parameter) -> None:
        if (known := reference()) is not None:
            known._on_gradient(param)

    return on_gradient
