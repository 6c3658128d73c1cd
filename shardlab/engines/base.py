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

The rest of the interface is in ``gradients`` (from backward to ``zero_grad()``), ``clip_and_step`` (from there to the
stepped model), ``holdings`` (what this rank holds) and ``state`` (what outlives the process).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.coalesced import broadcast_coalesced
from shardlab.comm.communicator import Communicator
from shardlab.engines.agreement import check_alike, number_among
from shardlab.engines.checks import check_model, check_optimizer_fn, check_types, tensor_axis
from shardlab.engines.claims import Claim, check_free
from shardlab.engines.clip_and_step import Stepping
from shardlab.engines.hooks import forward_is
from shardlab.engines.state import EngineState
from shardlab.engines.step_tensors import OptimizerFn, StepTensors
from shardlab.partition.slices import slices_of
from shardlab.vocabulary import MeshAxis


class Engine(Stepping, EngineState):
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

    replaces_params = False
    """Whether it puts parameters of its own into the module, by attribute, while it trains."""
    _allocates_params = False
    """Whether parameters may be on the meta device, to be allocated and initialized by this engine."""

    def __init__(self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None) -> None:
        check_types(model, mesh)
        check_free(model)
        check_optimizer_fn(optimizer_fn)
        self.module, self.mesh = model, BaseMesh.alone() if mesh is None else mesh
        self.data_comms = self._data_axes()
        self.comm = self.data_comms[-1]  # the innermost, over which strategies that shard do so
        self.slices = slices_of(model)  # of a tensor-parallel model, by parameter name
        self.tensor_comm = self._tensor_axis()
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())  # tied weights appear once
        check_model(
            model, self.mesh.device, self.num_data_ranks,
            may_be_meta=self._allocates_params, moves_params=self._steps_pieces,
        )  # fmt: skip
        self.num_steps = 0
        self.own_checkpoints: dict[Path, tuple[int, int]] = {}
        self.loss_is_scaled = False  # a GradScaler has said so
        super().__init__()  # of Gradients, which reads what has been set so far
        # Before anything is laid out, since all ranks must cut their shards from the same model.
        check_alike(self.data_comms, self.mesh.device, [*self.params.items(), *model.named_buffers()])
        self._equalise(
            [tensor for tensor in (*self.params.values(), *model.buffers()) if not tensor.is_meta],
            "parameters and buffers from rank 0",
        )
        self._equalise_over_tensor_ranks()
        self._given_params = dict(self.params)
        self._step_tensors = self._prepare()
        self.optimizer = self._make_optimizer(optimizer_fn)
        del self._given_params  # where others have taken their places, nothing else keeps their memory
        self._note_groups()
        # Last, when nothing can be refused any more: a refused model must keep no such hook and no mark.
        self._watch_params()
        self._hooks: list[RemovableHandle] = []  # further ones, which a strategy puts on the module
        self._claim = Claim(self, self.params.values(), self.optimizer)

    @property
    @override
    def data_rank(self) -> int:
        """This rank's number among those that gradients are averaged over, from 0."""
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
        self._before_forward()
        output = self.module(*args, **kwargs)
        self._backward_watch.run_hooks_last()  # a plain backward may show first by the hook of a parameter
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

    def _data_axes(self) -> tuple[Communicator, ...]:
        """The axes of the mesh to average over, outer first."""
        return (self.mesh[MeshAxis.DATA],)

    def _tensor_axis(self) -> Communicator | None:
        """The axis the model is sliced over."""
        return tensor_axis(self.mesh, self.module, self.slices)

    def _equalise(self, tensors: list[Tensor], tag: str) -> None:
        """Make tensors those of the first data rank, in place."""
        # Inner axis first, on all ranks: then the first rank of an outer axis sends on what it has just received.
        for comm in reversed(self.data_comms):
            broadcast_coalesced(comm, tensors, tag=tag)

    def _equalise_over_tensor_ranks(self) -> None:
        """Make what is no slice that of the first tensor rank, where only parts of the model were parallelized."""
        if self.tensor_comm is not None:
            whole = [param for name, param in self.params.items() if name not in self.slices]
            tensors = [tensor for tensor in (*whole, *self.module.buffers()) if not tensor.is_meta]
            broadcast_coalesced(self.tensor_comm, tensors, tag="whole parameters and buffers from tensor rank 0")

    def _prepare(self) -> StepTensors:
        """Lay out what the strategy needs, and return what this rank will step."""
        return StepTensors(self.params, are_parts=bool(self.slices))
