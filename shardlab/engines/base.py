"""The interface that all strategies share; what is different about each is in its own file.

    engine = Bucketed(model, lambda tensors: torch.optim.AdamW(tensors, lr=3e-4), mesh)
    loss = engine(x, y)
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()
    engine.zero_grad()

The module keeps its class, its parameter names and its buffers. Any torch optimizer works that needs no closure and
fits how parameters are divided (``optimizer_fit.py``). A copy of the module (``copy.deepcopy``, pickle) is a plain one,
without the engine; one that is divided over tensor ranks is not copied.
Gradients are means over the ranks of the data axis. ``loss.backward()`` instead of ``engine.backward(loss)`` works too:
the engine notices it and finishes the gradients at its end.

The rest of the interface is in ``gradients`` (from backward to ``zero_grad()``), ``holdings`` (what this rank holds)
and ``state`` (what outlives the process).
"""

import contextlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.coalesced import broadcast_coalesced
from shardlab.comm.communicator import Communicator
from shardlab.engines.agreement import all_or_none, check_alike, number_among
from shardlab.engines.checks import (
    check_max_norm,
    check_no_meta,
    check_optimizer,
    check_optimizer_fn,
    check_others_step,
    check_params,
    check_types,
    tensor_axis,
)
from shardlab.engines.claims import Claim, check_free
from shardlab.engines.clip import clip_
from shardlab.engines.gradients import Gradients
from shardlab.engines.holdings import Holdings
from shardlab.engines.hooks import forward_is
from shardlab.engines.optimizer_fit import Cut, check_sliced, fitting_optimizer, groups_of
from shardlab.engines.optimizer_trial import Stepped
from shardlab.engines.state import EngineState
from shardlab.engines.step_tensors import StepTensors, guard_groups
from shardlab.partition.slices import slices_of
from shardlab.vocabulary import MeshAxis, Partition

OptimizerFn = Callable[[StepTensors], torch.optim.Optimizer]


class Engine(Holdings, Gradients, EngineState):
    """A strategy around a plain module.

    Args:
        model: an ``nn.Module`` on its device. Its parameters and buffers become those of the first data rank.
        optimizer_fn: builds the optimizer from the tensors this rank steps (``StepTensors``). It may be called several
            times, also with tensors that only have the parameters' shapes; what it returns last is used.
        mesh: gradients are averaged over its axis ``data``; None for this process alone. A tensor-parallel model also
            needs the axis ``tensor`` that it was parallelized over.

    Raises:
        ValueError: an engine already wraps the module, a part of it, a module around it, or one that shares a parameter
            with it; the module has no parameters; or the mesh has no axis ``data``.
    """

    partition: Partition = Partition.ELEMENTS
    """How parameters are cut, where they are divided over ranks."""
    _pieces_are_rows = False
    """Whether no piece begins or ends inside a row."""
    _steps_pieces = False
    """Whether the optimizer is given pieces of parameters instead of the module's own."""

    def __init__(self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None) -> None:
        check_types(model, mesh)
        check_free(model)
        check_optimizer_fn(optimizer_fn)
        self.module, self.mesh = model, BaseMesh.alone() if mesh is None else mesh
        self.data_comms = self._data_axes()
        self.comm = self.data_comms[-1]
        self.slices = slices_of(model)  # of a tensor-parallel model, by parameter name
        self.tensor_comm = self._tensor_axis()
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())  # tied weights appear once
        self._check_model()
        self.num_steps = 0
        self.own_checkpoints: dict[Path, tuple[int, int]] = {}
        self.loss_is_scaled = False  # a GradScaler has said so
        self._is_closed = False
        super().__init__()
        # Before anything is laid out, since all ranks must cut their shards from the same model.
        check_alike(self.data_comms, self.mesh.device, [*self.params.items(), *model.named_buffers()])
        self._equalise(
            [*(param for param in self.params.values() if not param.is_meta), *model.buffers()],
            "parameters and buffers from rank 0",
        )
        self._groups = groups_of(optimizer_fn, self.params) if self._steps_pieces else None
        self._step_tensors = self._prepare()
        self.optimizer = self._make_optimizer(optimizer_fn)
        self._note_groups()
        # Last, when nothing can be refused any more: a refused model must keep no such hook and no mark.
        self._hooks = [hook for param in self.params.values() if (hook := self._watch(param)) is not None]
        self._claim = Claim(self, self.params.values(), self.optimizer)

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks that gradients are averaged over, each with its own rows."""
        return prod(comm.num_ranks for comm in self.data_comms)

    @property
    @override
    def data_rank(self) -> int:
        """This rank's number among them, from 0."""
        return number_among(self.data_comms)[0]

    @property
    @override
    def comms(self) -> tuple[Communicator, ...]:
        """All axes whose ranks train this model together: the data axes, outer first, then the tensor axis."""
        return self.data_comms if self.tensor_comm is None else (*self.data_comms, self.tensor_comm)

    def mean_over_ranks(self, value: Tensor, *, tag: str) -> Tensor:
        """The mean of a tensor over all data ranks, computed in place; blocking."""
        for comm in self.data_comms:
            comm.all_reduce(value, tag=tag).wait()
        return value.div_(self.num_data_ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        # First: after a plain backward that raised, FSDP would take this forward for a recomputation inside it.
        self._notice_failure()
        output = self.module(*args, **kwargs)
        self._run_hooks_last()  # a plain backward may show first by the hook of a parameter
        self._backward_watch.follow(output)
        return output

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` as if it were the module's forward: ``engine.call(model.encode, x)``.

        ``function`` is a method of the module other than ``forward``, or any function that computes with the module or
        calls it. Parameters are gathered, hooks run and ``backward`` works as with ``engine(x)``. FSDP gathers the
        root's parameters around it, and those of any other unit only around that unit's own forward.

        Args:
            function: what to call.
            args: its arguments.
            kwargs: its arguments by name.

        Raises:
            ValueError: ``function`` cannot be called.
        """
        with forward_is(self.module, function):
            return self(*args, **kwargs)

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
        norm = clip_(tensors, max_norm, norm_type, self.mesh.device)
        self.guard_slices()
        return norm

    def step(self) -> None:
        """One optimizer step; afterwards all ranks train on with the same model."""
        if self._steps_pieces:
            self._step_tensors.check_pieces(self.optimizer, self.params)
        self.take_changes()
        # On ranks that called no backward too: the others wait for their part of the reductions. (This does not help
        # where backward also gathers, as in zero3, nor where this rank has means of an earlier backward: the ranks'
        # collectives differ, and the error or the table of the hang says so.)
        self.finish_gradients()
        if self._count_stepped() != self._num_stepped:
            # A group was added: of a tensor that the engine does not know, nobody averages the gradients.
            check_optimizer(self.optimizer, self.step_tensors())
            self._note_groups()
        with self.stepping(), self._claim.stepping():
            try:
                self.optimizer.step()
            finally:  # after an error too, or later steps would change tensors that nobody gathers
                self._take_assigned()
        self._guarded.clear()  # spent: they may be zeroed in place, and some optimizers change them
        self.num_steps += 1
        self.after_optimizer_step()  # without hooks the optimizer has not called it, and hooks may have written since

    def before_others_step(self, optimizer: torch.optim.Optimizer, *, inside: bool) -> None:
        """Another optimizer of this process is about to step; ``inside`` a step of the engine's own.

        Raises:
            RuntimeError: it steps parameters of the module of which this engine steps pieces, or steps parameters
                before their gradients are averaged.
        """
        if inside:
            return
        several = self.num_data_ranks > 1
        is_early, is_behind = several and self._backward_watch.is_inside, several and self._step_tensors.are_behind
        check_others_step(optimizer, self.params, self._step_tensors, self.name, is_early=is_early, is_behind=is_behind)

    def take_changes(self) -> None:
        """Before a step: take over what the user has written, or refuse what the step would miss."""
        return

    def before_optimizer_step(self) -> None:
        """The engine's optimizer is about to step; called after its hooks, which may have written."""
        self.take_changes()

    def after_optimizer_step(self) -> None:
        """The engine's optimizer has stepped; called before its hooks, which must find the stepped model."""
        return

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group; setting it sets that of all groups."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    @override
    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``step_tensors()`` are where the optimizer keeps its state."""
        return contextlib.nullcontext()

    @override
    def install_optimizer_state(self, state: dict[str, Any]) -> None:
        # Torch moves the state to the device of the tensors; inside, those are where they are stepped.
        with self.stepping(), self._claim.installing():
            self.optimizer.load_state_dict(state)

    def close(self) -> None:
        """Give the module back, so that it trains alone again. A second call does nothing.

        The first call is collective where this rank keeps only pieces of the parameters, or rounded ones: it gathers.
        Mean gradients that are in pieces are dropped: step first.
        """
        if not self._is_closed:
            self._give_back()  # not in a second call, which must not gather without the other ranks
        self._is_closed = True
        self._backward_watch.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # Last: another engine may take the module only when no hook of this one is left on it.
        self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        # No gather after an error: the other ranks may never join it.
        if exc_type is None or not self._keeps_pieces:
            self.close()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: an engine is not copied or pickled, since its hooks and communicators belong to "
            "this process; copy engine.full_state_dict() or, inside 'with engine.full_params():', the module"
        )

    def _take_assigned(self) -> None:
        """Take over what the optimizer has put in the place of a piece by assigning to its ``.data``."""
        return

    def _data_axes(self) -> tuple[Communicator, ...]:
        """The axes of the mesh to average over, outer first."""
        return (self.mesh[MeshAxis.DATA],)

    def _tensor_axis(self) -> Communicator | None:
        """The axis the model is sliced over."""
        return tensor_axis(self.mesh, self.module, self.slices)

    def _check_model(self) -> None:
        """Refuse a model that the strategy cannot train."""
        check_params(self.params, self.mesh.device)
        check_max_norm(self.module, self.num_data_ranks)
        check_no_meta(self.params)

    def _equalise(self, tensors: list[Tensor], tag: str) -> None:
        """Make tensors those of the first data rank, in place."""
        # Inner axis first, on all ranks: then the first rank of an outer axis sends on what it has just received.
        for comm in reversed(self.data_comms):
            broadcast_coalesced(comm, tensors, tag=tag)

    def _prepare(self) -> StepTensors:
        """Lay out what the strategy needs, and return what this rank will step."""
        return StepTensors(self.params, are_parts=bool(self.slices))

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        """The optimizer; refuses one that would be wrong for how the parameters are divided."""
        num_ranks = 1 if self.sharded_over is None else self.sharded_over.num_ranks
        cut = Cut(self.partition, num_ranks, by_rows=self._pieces_are_rows)

        def make() -> torch.optim.Optimizer:
            optimizer = fitting_optimizer(optimizer_fn, self._stepped(), cut)
            check_sliced(optimizer, self._stepped(), self.slices)
            return optimizer

        try:
            # Pieces differ by rank, so one rank may refuse its own while another accepts: then all must refuse.
            return make() if num_ranks == 1 else all_or_none(self.comms, self.mesh.device, make)
        except Exception:
            # This may gather. All ranks have raised, so all of them join.
            self._give_back()
            raise

    def _give_back(self) -> None:
        """Put into the module what plain training needs; collective where this rank keeps only pieces."""
        return

    def _note_groups(self) -> None:
        self._num_stepped = self._count_stepped()
        if any(tensor is not self.params[name] for name, tensor in self._step_tensors.items()):
            guard_groups(self.optimizer, self._step_tensors)

    def _count_stepped(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _stepped(self) -> Stepped:
        """What the optimizer steps."""
        shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        # Asked inside, since offloaded pieces are on the device of the optimizer only during a step.
        with self.stepping():
            return Stepped(self.step_tensors(), shapes, self.step_tensors()[0].device, self._groups)
