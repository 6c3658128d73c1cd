"""What our engine and torch's own have in common: what a training loop calls, and what is asked of either."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.coalesced import broadcast_coalesced
from shardlab.comm.communicator import Communicator
from shardlab.comm.same_on_all_ranks import check_alike, number_among
from shardlab.comm.trees import tensors_in
from shardlab.engines.clip import Axes, clip_
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.step_tensors import OptimizerFn, StepTensors
from shardlab.partition.slices import slices_of
from shardlab.vocabulary import MeshAxis, Role, class_of

_ALWAYS = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.OTHER)


class Stateful(Protocol):
    """What can be saved with an engine: a scheduler, a scaler, anything with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...  # noqa: D102


class AnyEngine(ABC):
    """A strategy around a plain module: ``Engine``, or one of ``engines.peers``.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        axes: those to average over, outer first.
    """

    name: str = ""
    checkpointer: Any
    """The package ``engines/checkpoint``; set by ``shardlab.engines``: an engine can be read and used without."""
    broadcasts_buffers: bool = False
    """Whether forwards begin with the first data rank's buffers, whatever each rank has made of its own."""
    optimizer: torch.optim.Optimizer
    _step_tensors: StepTensors
    _divisions: Sequence[Division] = ()
    _full_gathers = False
    """Whether what is loaded and handed back are the stepped pieces, and not whole parameters."""

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None, axes: Sequence[str],
    ) -> None:  # fmt: skip
        self.module, self.mesh = model, BaseMesh.alone() if mesh is None else mesh
        # Ranks with other parts of a sequence have other tokens, as ranks with other rows have.
        inner = (MeshAxis.CONTEXT,) if MeshAxis.CONTEXT in self.mesh.axes else ()
        self.data_comms = (*(self.mesh[axis] for axis in axes[:-1]), self.mesh.flatten(axes[-1], *inner))
        self.num_data_ranks = prod(comm.num_ranks for comm in self.data_comms)  # each with its own rows
        self.data_rank = number_among(self.data_comms)[0]  # this rank's number among them, from 0
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
        if not callable(function):
            raise ValueError(
                f"function: {class_of(function)} cannot be called; give a method or a function, for example "
                "engine.call(engine.module.encode, x)"
            )
        # Torch's own way, ``register_fsdp_forward_method``, works with its FSDP2 only.
        own_attributes = vars(self.module)  # of the instance, not of its class
        own = own_attributes.get("forward")

        def restore() -> None:
            own_attributes.pop("forward", None)
            if own is not None:
                own_attributes["forward"] = own

        def forward(*args: Any, **kwargs: Any) -> Any:
            # First: ``function`` may call the module, which must then run its own forward.
            restore()
            return function(*args, **kwargs)

        own_attributes["forward"] = forward
        try:
            return self(*args, **kwargs)
        finally:
            restore()

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
        """Scale the gradients so that their global norm, over all stages of a pipeline, is at most ``max_norm``.

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
        stages = self.mesh[MeshAxis.PIPE] if MeshAxis.PIPE in self.mesh.axes else None
        norm = clip_(tensors, max_norm, norm_type, self.mesh.device, stages)
        self.means_changed()
        return norm

    @abstractmethod
    def finish_gradients(self) -> None:
        """Return when the gradients are means over the data axes."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""

    @abstractmethod
    def step(self) -> None:
        """One optimizer step; afterwards all ranks train on with the same model."""

    def means_changed(self) -> None:  # noqa: B027
        """To be called by code that has changed mean gradients in place, or may have; guards take that for right."""

    @abstractmethod
    def close(self) -> None:
        """Give the module back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        if exc_type is None:
            self.close()
        elif not self._full_gathers:  # no gather after an error: the other ranks may never join it
            with contextlib.suppress(RuntimeError, ValueError):  # what is refused too
                self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: an engine is not copied or pickled, since its hooks and communicators belong to "
            "this process; copy engine.full_state_dict() or, inside 'with engine.full_params():', the module"
        )

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

    @abstractmethod
    def install_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a state dict of the optimizer over this rank's ``step_tensors()``."""

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """What all ranks begin with alike, after a check that it has the same names and shapes on all of them."""
        named = [*self.params.items(), *self.module.named_buffers()]
        check_alike(self.data_comms, self.mesh.device, named)
        return [(name, tensor) for name, tensor in named if not tensor.is_meta]

    def _equalise(self, tensors: list[Tensor], tag: str = "parameters and buffers from rank 0") -> None:
        """Make tensors those of the first data rank, in place."""
        # Inner axis first, on all ranks: then the first rank of an outer axis sends on what it has just received.
        for comm in reversed(self.data_comms):
            broadcast_coalesced(comm, tensors, tag=tag)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"engine: {self.name} was closed, by close() or by the end of its 'with' block, and its module is "
                "plain; build another engine, or use the module itself"
            )

    # What outlives the process: full state dicts, and checkpoints that any strategy can load.

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """Inside, the module has its full parameters on every rank; of a tensor-parallel model this rank's slices.

        In this engine they always are, so nothing is sent, and every change in place stays.

        Args:
            keep_changes: where parameters are sharded, copy changes in place back into the shards; without it they
                are lost. Every rank must write the same values; nothing checks that.
        """
        yield self.module

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of the module's whole state, the same on every rank, which loads strict into the plain module.

        Buffers and extra state may differ between ranks (a BatchNorm's statistics of their rows); the first data rank's
        are returned, as in a checkpoint. Collective; sends nothing if the module has neither and its parameters are
        neither sharded, rounded nor sliced. The module itself does not change.
        """
        with self.full_params():
            return self.checkpointer.full_state_dict(self)  # type: ignore[no-any-return]

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict()`` or the plain module's ``state_dict()`` returned.

        Raises:
            RuntimeError: names or shapes differ; torch's message names them, and nothing has changed.
        """
        self.checkpointer.load_full_state_dict(self, state)

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's whole state, the same on every rank; collective.

        Returns:
            What the plain optimizer's ``state_dict()`` would be: full tensors, parameters numbered through the groups.
            An optimizer over ``list(model.parameters())``, or over the same groups, loads it.
        """
        return self.checkpointer.full_optimizer_state_dict(self)  # type: ignore[no-any-return]

    def load_full_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_optimizer_state_dict()`` or the plain optimizer's ``state_dict()`` returned.

        Each rank keeps copies of its pieces. Communicates nothing.

        Raises:
            ValueError: the parameter groups differ, or this engine cannot cut the state into pieces.
        """
        self.checkpointer.load_full_optimizer_state_dict(self, state)

    def named_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """A copy of the optimizer's whole state by parameter name, the same on every rank; collective.

        Returns:
            For each parameter that has been stepped, what the plain optimizer would hold for it: full tensors, such as
            ``["0.weight"]["exp_avg"]``, and step counters.
        """
        return self.checkpointer.named_optimizer_state(self)  # type: ignore[no-any-return]

    def load_named_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what ``named_optimizer_state()`` returned, whatever the order of its parameters and groups.

        A parameter that is not in it starts without state. Options such as the learning rate stay the engine's own.
        Communicates nothing.

        Args:
            state: full tensors, the same on every rank.

        Raises:
            ValueError: a parameter is unknown, or this engine cannot cut the state into pieces.
        """
        self.checkpointer.load_named_optimizer_state(self, state)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients by parameter name: means over the data ranks, the same on every rank; collective.

        Pending reductions are finished first. After ``clip_grad_norm_`` the gradients are clipped.

        Returns:
            Full tensors in the shapes of the whole model, also where tensor parallelism divides its layers; None for
            a parameter that no rank used.

        Raises:
            RuntimeError: inside ``no_sync()``, where gradients are not means yet.
        """
        if not self._sync:
            raise RuntimeError("full_gradients: inside no_sync() they are not means; call it after the last backward")
        self.finish_gradients()
        return self._gather_gradients()

    def save(self, directory: str | Path, *, extra: Any = None, **objects: Stateful) -> None:
        """Write a checkpoint that any strategy at any number of ranks can load; collective.

        Saves the model, the optimizer, the number of steps and the random generators, but no gradients: call it after
        ``step()``. If the run is killed while it saves, the previous checkpoint stays intact.

        Args:
            directory: a directory all ranks share. It keeps the last complete checkpoint of this engine; what another
                run has written there stays beside it.
            extra: numbers, text, lists, dicts and small tensors of your own; the first rank's are saved.
            objects: what else to save, by a name of your choice: ``scheduler=scheduler, scaler=scaler``. Each must be
                the same on all ranks.

        Raises:
            ValueError: a checkpoint cannot hold what was given; on all ranks.
            RuntimeError: a rank could not write; on all ranks.
        """
        self.checkpointer.save_checkpoint(self, Path(directory), extra, objects)

    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """Continue from a checkpoint; collective. Each rank reads what it holds. Gradients are cleared.

        Each rank restores the random generators of the rank with its number; if there was none, they are seeded with
        that number and the state of the first rank, so that each rank draws numbers of its own.
        The ranks first read all files to compare their checksums, each rank its share of them.

        Args:
            directory: where a checkpoint was saved: its last one is loaded. Or the folder of one version in it.
            objects: which of the objects saved with it to load.

        Returns:
            The ``extra`` it was saved with.

        Raises:
            ValueError: something is missing, damaged, or of another model or optimizer; on all ranks. Nothing of the
                engine has changed.
            RuntimeError: one of ``objects``, or a module's ``set_extra_state``, raised; on all ranks. No tensor of the
                engine has changed, but objects before that one have.
        """
        extra = self.checkpointer.load_checkpoint(self, Path(directory), objects)
        # The gradients belong to the values that were just replaced.
        self.zero_grad()
        return extra

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        return self.checkpointer.full_gradients(self)  # type: ignore[no-any-return]

    # What this rank holds: from ``holdings()`` and ``divisions()`` all else is derived.

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """Every long-lived tensor of the engine; a storage that comes in several roles counts in the first."""

    def divisions(self) -> Sequence[Division]:
        """How the parameters are divided, bucket by bucket; empty without buckets, where they are all whole."""
        return self._divisions

    def step_tensors(self) -> StepTensors:
        """What this rank steps, by name, in the module's order.

        Write into them on all ranks alike, into empty ones too: what only some ranks have written is gathered by some.
        """
        return self._step_tensors

    @property
    def sharded_over(self) -> Communicator | None:
        """The ranks over which ``step_tensors()`` are spread; None where each rank steps everything."""
        return next((division.comm for division in self.divisions() if division.is_spread), None)

    def spread_over(self) -> dict[str, tuple[Communicator, ...]]:
        """For each parameter, the axes over which its stepped pieces are spread; () where each rank steps all of it."""
        shards = {
            name: (division.comm,)
            for division in self.divisions() if division.is_spread for name in division.layout.names
        }  # fmt: skip
        tensor = () if self.tensor_comm is None else (self.tensor_comm,)
        return {name: shards.get(name, ()) + (tensor if name in self.slices else ()) for name in self.params}

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) that this rank steps of each flattened parameter it steps anything of."""
        return dict(self._spans)

    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """What a checkpoint is loaded into: the part this rank keeps of each parameter, and which elements it has."""
        if self._full_gathers:
            return {name: (self.step_tensors().by_name(name), *span) for name, span in self.owned().items()}
        return {name: (param, 0, param.numel()) for name, param in self.params.items()}

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """The engine's long-lived tensors by role; a storage that appears in two roles belongs to the first.

        Step counters of the optimizer and buffers of the module are ``Role.OTHER``, so that optimizer state is exactly
        what the formulas count.
        """
        live: dict[Role, list[Tensor]] = {}
        for holding in self.holdings():
            live.setdefault(holding.role, []).append(holding.tensor)
        return live | {role: [] for role in _ALWAYS if role not in live}

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        # Cached: every sample of the live tensors needs it, and no layout changes once the engine is built.
        if self.sharded_over is None:
            return {name: (0, param.numel()) for name, param in self.params.items()}
        return owned_in(self.divisions(), self.params)

    def _state_holdings(self) -> Iterator[Holding]:
        spans = self.owned()
        for name, tensor in self.step_tensors().items():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                for kept in tensors_in(value):  # Shampoo has a list: a matrix for each dim
                    yield of_state(key, kept, name if name in spans else "", spans.get(name, (0, 0)))


def owned_in(divisions: Iterable[Division], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The elements (start, stop) that this rank has of each flattened parameter it has anything of."""
    spans = {name: span for division in divisions for name, span in division.pieces_of(division.comm.rank).items()}
    return {name: spans[name] for name in names if name in spans}


def of_state(key: str, value: Tensor, name: str, span: tuple[int, int]) -> Holding:
    """What an optimizer keeps under ``key`` for a parameter; no formula counts a step counter as optimizer state."""
    return Holding(Role.OTHER, value) if key == "step" else Holding(Role.OPTIMIZER_STATE, value, name, span)
