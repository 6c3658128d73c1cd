"""What our engine and torch's own have in common: what a training loop calls, and what is asked of either."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.agreement import check_alike, number_among
from shardlab.comm.communicator import Communicator
from shardlab.engines.checks import check_types
from shardlab.engines.clip import Axes, clip_
from shardlab.engines.holdings import Holdings
from shardlab.engines.hooks import forward_is
from shardlab.engines.state import EngineState
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.partition.slices import slices_of
from shardlab.vocabulary import MeshAxis


class AnyEngine(Holdings, EngineState):
    """A strategy around a plain module: ``Engine``, or one of ``engines.peers``.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        axes: those to average over, outer first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: OptimizerFn,
        mesh: BaseMesh | None,
        axes: Sequence[MeshAxis],
    ) -> None:
        check_types(model, mesh, optimizer_fn)
        self.module, self.mesh = model, BaseMesh.alone() if mesh is None else mesh
        self.data_comms = tuple(self.mesh[axis] for axis in axes)
        self.num_data_ranks = prod(comm.num_ranks for comm in self.data_comms)  # each with its own rows
        self.comm = self.data_comms[-1]  # the innermost, over which strategies that shard do so
        self.slices = slices_of(model)  # of a tensor-parallel model, by parameter name
        self.tensor_comm: Communicator | None = None
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())  # tied weights appear once
        self.num_steps = self.num_backwards = 0
        self.own_checkpoints: dict[Path, tuple[int, int]] = {}
        self.loss_is_scaled = False  # a GradScaler has said so
        self._is_closed = False
        self._sync = True  # not inside no_sync()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` as if it were the module's forward: ``engine.call(model.encode, x)``.

        ``function`` is a method of the module other than ``forward``, or any function that computes with the module or
        calls it. Parameters are gathered, hooks run and ``backward`` works as with ``engine(x)``. FSDP gathers the
        root's parameters around it, and those of any other unit only around that unit's own forward.

        Raises:
            ValueError: ``function`` cannot be called.
        """
        with forward_is(self.module, function):
            return self(*args, **kwargs)

    @abstractmethod
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of ``loss``, averaged over the data axes unless inside ``no_sync()``."""

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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Args:
            max_norm: greater than 0.
            norm_type: 1, 2 or inf.

        Returns:
            The norm before clipping, 0-d, equal on all ranks.
        """
        self.finish_gradients()
        tensors: dict[Axes, list[Tensor]] = {}
        for name, axes in self.spread_over().items():
            tensors.setdefault(axes, []).append(self._step_tensors.by_name(name))
        return clip_(tensors, max_norm, norm_type, self.mesh.device)

    @abstractmethod
    def step(self) -> None:
        """One optimizer step; afterwards all ranks train on with the same model."""

    def guard_slices(self) -> None:
        """Whoever may change the means calls this after it."""

    @abstractmethod
    def close(self) -> None:
        """Give the module back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        if exc_type is None:
            self.close()
        elif not self._keeps_pieces:  # no gather after an error: the other ranks may never join it
            with contextlib.suppress(RuntimeError, ValueError):  # what is refused too
                self.close()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: an engine is not copied or pickled, since its hooks and communicators belong to "
            "this process; copy engine.full_state_dict() or, inside 'with engine.full_params():', the module"
        )

    @property
    def data_rank(self) -> int:
        """This rank's number among those that gradients are averaged over, from 0."""
        return number_among(self.data_comms)[0]

    @property
    def comms(self) -> tuple[Communicator, ...]:
        """All axes whose ranks train this model together: the data axes, outer first, then the tensor axis."""
        return self.data_comms if self.tensor_comm is None else (*self.data_comms, self.tensor_comm)

    def mean_over_ranks(self, value: Tensor, *, tag: str) -> Tensor:
        """The mean of a tensor over all data ranks, computed in place; blocking."""
        for comm in self.data_comms:
            comm.all_reduce(value, tag=tag).wait()
        return value.div_(self.num_data_ranks)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group; setting it sets that of all groups."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``step_tensors()`` are on the device of the optimizer's state."""
        return contextlib.nullcontext()

    @abstractmethod
    def install_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a state dict of the optimizer over this rank's ``step_tensors()``."""

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """What all ranks begin with alike, after a check that it has the same names and shapes on all of them."""
        named = [*self.params.items(), *self.module.named_buffers()]
        check_alike(self.data_comms, self.mesh.device, named)
        return [(name, tensor) for name, tensor in named if not tensor.is_meta]

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"engine: {self.name} was closed, by close() or by the end of its 'with' block, and its module is "
                "plain; build another engine, or use the module itself"
            )
