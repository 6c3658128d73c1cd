"""Torch's own engines behind the interface of ours: the same loop, the same tables, the same tests.

They send through a group that notifies the observers of the mesh's axis (``comm.torch_engine_groups``), so their
collectives are recorded like ours. Torch reduces the gradients: they are means when ``loss.backward()`` returns. What
``no_sync()`` has left is sent by the next backward alone: clip and step before it use each rank's own, as in torch.
Torch's parts are imported when one of these engines is built, since that takes half a second.
"""

import contextlib
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.comm.torch_engine_groups import TorchGroup, torch_group
from shardlab.comm.trees import tensors_in
from shardlab.engines.any_engine import AnyEngine
from shardlab.engines.guards.model_checks import check_model, check_optimizer, check_rows, check_types
from shardlab.engines.guards.ownership import Claim, check_free
from shardlab.engines.holdings import Holding
from shardlab.engines.step_tensors import OptimizerFn, StepTensors
from shardlab.vocabulary import Collective, MeshAxis, Role

STATE_IS_TORCHS = (
    "keeps its optimizer state in torch's own form; use full_state_dict() for the parameters and "
    "torch.distributed.checkpoint for the rest, or a strategy of shardlab"
)
"""``no_checkpoints`` of a peer whose optimizer state is in torch's own form."""


class WithoutState:
    """A checkpointer that refuses what needs the optimizer's state in our form.

    Args:
        checkpointer: the package, which does all else.
        why: its message goes on behind the method's name.
    """

    def __init__(self, checkpointer: Any, why: str) -> None:
        self._checkpointer, self._why = checkpointer, why

    def __getattr__(self, method: str) -> Any:
        if method in ("full_state_dict", "load_full_state_dict", "full_gradients", "first_ranks_own"):
            return getattr(self._checkpointer, method)
        raise NotImplementedError(f"{method.removesuffix('_checkpoint')}: {self._why}")


class Peer(AnyEngine):
    """One of torch's own engines.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: over all ranks of the default group; not None.
        observed: whether observers are told about its collectives; False gives torch its plain group, to time it.

    Raises:
        ValueError: the mesh leaves ranks out, emulates a link, or has several ranks on a GPU.
    """

    axis: ClassVar[str] = MeshAxis.DATA
    no_checkpoints: ClassVar[str] = ""
    """Why a checkpoint cannot hold this strategy's optimizer state, and what to use instead; empty where it can."""
    sends: ClassVar[Mapping[Collective, str]]
    """What each collective of a training step is for; in the tag, its number in the step follows."""

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None, *, observed: bool = True
    ) -> None:
        check_types(model, mesh, optimizer_fn)
        if mesh is None:
            raise ValueError(f"mesh: {self.name!r} needs one, over all ranks of a RankPool, launch or torchrun")
        check_free(model)
        super().__init__(model, optimizer_fn, mesh, (MeshAxis.DATA,))
        check_rows(mesh, (MeshAxis.DATA,), self.name)
        if self.slices:
            raise ValueError(f"model: parallelize_module has already sliced it; give {self.name!r} a whole one")
        if self.no_checkpoints:
            self.checkpointer = WithoutState(self.checkpointer, f"strategy {self.name!r} {self.no_checkpoints}")
        self._occasion = "setup"
        self._counts: Counter[Collective] = Counter()
        # Weakly: the engine holds its group, and torch holds groups in C++, where Python's collector sees no cycles.
        engine = weakref.proxy(self)
        self._group = torch_group(mesh, self.axis, (lambda op: engine._tag(op)) if observed else None)
        check_model(model, mesh.device, self.num_data_ranks, may_be_meta=False, moves_params=False)
        self._equalise([tensor for _, tensor in self._named_tensors()])
        self._are_means = True  # no forward has come since torch has made means
        self._prepare()
        self._step_tensors = StepTensors(self.params)
        self.optimizer = self._make_optimizer(optimizer_fn)
        self._claim = Claim(self, self.params.values(), self.optimizer)
        # Only now: what was sent until here is no part of a training step.
        self._occasion = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, through torch's engine."""
        self._refuse_closed()
        # The numbers in the tags begin again with each forward.
        self._counts.clear()
        self._are_means = False
        return self._forward(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """As in ``Engine``."""
        self._refuse_closed()
        self.num_backwards += 1
        loss.backward(retain_graph=retain_graph)
        if self._sync:
            self.finish_gradients()

    def finish_gradients(self) -> None:
        """The gradients are already means, and torch's C++ code has waited for them: record when it did."""
        self._refuse_closed()
        if not self._are_means:
            self._are_means = True
            if isinstance(self._group, TorchGroup):
                self._group.end_waits()
            self._means_are_there()

    def step(self) -> None:
        """One optimizer step; afterwards the parameters are equal on all ranks."""
        self._counts.clear()
        self.finish_gradients()
        with self._claim.during("step"):
            self.optimizer.step()
        self.num_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``Engine``."""
        self._refuse_closed()
        for param in self.params.values():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def close(self) -> None:
        """Let the module go; a second call does nothing."""
        self._is_closed = True
        self._claim.release()

    def install_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a state dict of the optimizer over this rank's ``step_tensors()``."""
        with self._claim.during("load"):
            self.optimizer.load_state_dict(state)

    def holdings(self) -> Iterator[Holding]:
        """As the base."""
        # Parameters first: what follows may be a view of one, and must not count as a second copy.
        for name, param in self.params.items():
            yield from self._pieces(Role.PARAMETER, param, name)
        for name, param in self.params.items():
            if param.grad is not None:
                yield from self._pieces(Role.GRADIENT, param.grad, name)
        for name, param in self.params.items():
            for key, value in self._state_of(param).items():
                for kept in tensors_in(value):
                    yield from self._pieces(Role.OTHER if key == "step" else Role.OPTIMIZER_STATE, kept, name)
        yield from (Holding(Role.OTHER, buffer) for buffer in self.module.buffers())

    def _pieces(self, role: Role, tensor: Tensor, name: str) -> Iterator[Holding]:
        """What this rank has of a tensor that lies as the parameter of this name does; a step counter is no such."""
        of_param = () if role is Role.OTHER else (name, (0, self.params[name].numel()))
        yield Holding(role, tensor, *of_param)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        return self.optimizer.state.get(param, {})  # type: ignore[no-any-return]

    @abstractmethod
    def _prepare(self) -> None:
        """Build torch's engine around the module."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        optimizer = optimizer_fn(self._step_tensors)
        check_optimizer(optimizer, self._step_tensors)
        return optimizer

    def _means_are_there(self) -> None:
        """Torch has reduced the gradients."""

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        return {name: None if param.grad is None else param.grad.clone() for name, param in self.params.items()}

    @contextlib.contextmanager
    def _for(self, occasion: str) -> Iterator[None]:
        """Inside, collectives are tagged with the occasion."""
        before, self._occasion = self._occasion, occasion
        try:
            yield
        finally:
            self._occasion = before

    def _tag(self, op: Collective) -> str:
        if self._occasion:
            return self._occasion
        number, self._counts[op] = self._counts[op], self._counts[op] + 1
        return f"{self.sends.get(op, op)} {number}"
