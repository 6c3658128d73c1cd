"""The two sides of a scenario: an engine on this rank, and one process of plain torch that has the rows of all ranks.

The one process averages the ranks' losses. Its modules, one for each rank, have the same parameters and buffers of
their own, since what a forward writes into a buffer stays on its rank.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import AnyEngine
from shardlab.engines.step_tensors import StepTensors
from shardlab.optimizers import GradScaler
from tests.fuzzing import modules
from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.meshes import Meshes
from tests.fuzzing.modules import Model, ModuleSpec, prediction, rows
from tests.fuzzing.optimizers import OptimizerSpec
from tests.fuzzing.parallel import make_parallel, own_part
from tests.fuzzing.rest import AtRest

Seen = dict[str, Any]
Losses = list[Tensor]  # one for each rank
T = TypeVar("T")
R = TypeVar("R")


def loss_of(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(prediction(output), target)


def on_all(function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """Call a function on all values, also on those behind one that fails; then raise the first error."""
    found, errors = [], []
    for value in values:
        try:
            found.append(function(value))
        except (ValueError, RuntimeError, ArithmeticError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


class Ours:
    """The engine's side, as a user of one rank has it.

    Attributes:
        engine: None on a rank that takes no part, see ``EngineSpec.leaves_out``.
        losses: of forwards whose backward has not come.
        kept: what ``StateOut`` and ``OptimizerOut`` have kept.
    """

    engine: AnyEngine

    def __init__(self, spec: EngineSpec, module: ModuleSpec, optimizer: OptimizerSpec, mesh: Mesh) -> None:
        self.module_spec, self.optimizer_spec = module, optimizer
        self.losses: list[Tensor] = []
        self.kept: Seen = {}
        self.scaler = GradScaler(init_scale=8.0)
        self.begin(spec, mesh, seed=None)

    @property
    def is_member(self) -> bool:
        return self.mesh.is_member

    @property
    def rank(self) -> int:
        return self.engine.data_rank if self.is_member else 0

    def begin(self, spec: EngineSpec, mesh: Mesh, seed: int | None) -> None:
        """A fresh module with an engine around it; ``seed`` None: one for each rank, which the engine makes equal."""
        if mesh.is_member:
            model = modules.build(self.module_spec, _place(mesh) if seed is None else seed)
            make_parallel(model, mesh)
            hooks, at_rest = hooks_of(model), AtRest.of(model, spec)
            engine = spec.build(model, self._optimizer_of, mesh)  # may be refused: then all stays as it is
            self.engine, self.hooks_before, self.hooks_within = engine, hooks, hooks_of(model)
            self.at_rest = at_rest
            self.scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.8)
        self.spec, self.mesh = spec, mesh

    def move(self, spec: EngineSpec, mesh: Mesh, scale: float) -> None:
        """Begin with another engine, around another module of the same kind, and close this one."""
        was_member, before = self.is_member, getattr(self, "engine", None)
        self.begin(spec, mesh, seed=7)
        if was_member and before is not None:
            before.close()
        elif self.is_member:
            self.scaler = GradScaler(init_scale=scale)

    def _optimizer_of(self, tensors: StepTensors) -> torch.optim.Optimizer:
        return self.optimizer_spec.build(list(tensors.items()))

    def forward(self, seed: int, called: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        """Loss and prediction of this rank's rows; ``called`` by ``engine.call()``."""
        x, y = rows(seed, self.rank)
        forward = partial(self.engine.call, self.engine.module.forward) if called else self.engine
        output = forward(x, **options)
        return loss_of(output, y), prediction(output).detach()


class Plain:
    """One process, with the rows of all ranks."""

    def __init__(self, module: ModuleSpec, optimizer: OptimizerSpec, num_ranks: int) -> None:
        self.module_spec = module
        self.models: list[Model] = modules.replicas([modules.build(module)], num_ranks)
        self.params = dict(self.models[0].named_parameters())
        self.optimizer = optimizer.build(list(self.params.items()))
        self.fresh_groups = len(self.optimizer.param_groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.8)
        self.losses: list[Losses] = []
        self.kept: Seen = {}
        self.num_steps = 0
        self.scale = 8.0

    def forward(
        self,
        seed: int,
        rank: int,
        *,
        depth: int | None = None,
        fault: str = "none",
        on: int | None = None,
        only: int | None = None,
    ) -> tuple[Losses, Tensor]:
        """The loss of every rank, and what one rank predicts.

        Args:
            seed: of the rows.
            rank: whose prediction.
            depth: blocks that are called; None for all.
            fault: see ``Forward``.
            on: the only rank that has the fault; None for all.
            only: the only rank that does it; None for all.
        """

        def one(number: int) -> tuple[Tensor, Tensor]:
            x, y = rows(seed, number)
            output = self.models[number](x, depth=depth, fault=fault if on in (None, number) else "none")
            return loss_of(output, y), prediction(output).detach()

        found = on_all(one, range(len(self.models)) if only is None else (only,))
        return [loss for loss, _ in found], found[rank if only is None else 0][1]

    def backward(self, losses: Losses, *, retain_graph: bool = False) -> None:
        """Backward of the mean of the ranks' losses, each by itself, so that an error of one keeps none from going."""
        on_all(lambda loss: (loss / len(losses)).backward(retain_graph=retain_graph), losses)

    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1

    def zero_grad(self) -> None:
        for param in self.params.values():
            param.grad = None

    def detached(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.params.items()}

    def state(self, rank: int) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.models[rank].state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        for model in self.models:
            model.load_state_dict(state, strict=True)

    def states(self) -> list[dict[str, Tensor]]:
        return [self.state(rank) for rank in range(len(self.models))]

    def restore(self, states: list[dict[str, Tensor]]) -> None:
        self.resize(len(states))
        for model, state in zip(self.models, states, strict=True):
            model.load_state_dict(state, strict=True)

    def resize(self, num_ranks: int) -> None:
        self.models = modules.replicas(self.models, num_ranks)

    def thaw(self) -> None:
        """What trains as in a fresh module."""
        for name, param in modules.build(self.module_spec).named_parameters():
            self.params[name].requires_grad_(param.requires_grad)

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if param.grad is None else param.grad.clone() for name, param in self.params.items()}

    def named_state(self) -> dict[str, dict[str, Any]]:
        return {name: self.optimizer.state[p] for name, p in self.params.items() if p in self.optimizer.state}


@dataclass
class World:
    """Both sides and what is known of them."""

    ours: Ours  # the engine's side
    plain: Plain  # one process
    meshes: Meshes  # of this rank
    directory: Path | None = None  # shared by the ranks, for checkpoints; or None
    tolerance: float = 1e-10  # of a comparison, absolute for values up to 1
    # 'means' where the engine's gradients can be compared, else 'local', or 'changed' by the user
    gradients: str = "means"
    unfinished: bool = False  # a plain ``loss.backward()`` may not have been finished
    gathered: bool = False  # parameters may be there in full now
    may_clash: bool = False  # an error of autograd's version check may come from a step between forward and backward
    saved: dict[str, Any] = field(default_factory=dict)  # what ``Save`` has written
    left_alone: bool = False  # an error on one rank has left the others alone where they gather parameters
    has_met: bool = False  # two different collectives have met, so that the engine is of no use any more
    is_plain: bool = False  # the last backward was a plain ``loss.backward()``
    has_stale: bool = False  # gradients were cleared while a loss waited, whose forward FSDP then forgets

    @property
    def rank(self) -> int:
        return self.ours.rank

    @property
    def has_absent(self) -> bool:
        """Whether some ranks of the pool take no part, the same on all ranks."""
        return self.ours.spec.leaves_out(self.meshes.num_ranks)

    def own(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank's model has of parameters, or of their gradients, by name."""
        if not self.ours.is_member:
            return values
        return {name: own_part(self.ours.engine, name, value) for name, value in values.items()}

    def settle(self) -> None:
        """Gradients are means, and nothing is gathered but what a loss that waits may keep."""
        self.gradients, self.unfinished = "means", False
        self.gathered = bool(self.plain.losses) and self.ours.spec.keeps_gathered

    def recover(self) -> None:
        """What a user does who has caught an error and goes on with the next batch."""
        self.ours.losses.clear()
        self.plain.losses.clear()
        if self.ours.is_member:
            self.ours.engine.zero_grad()
        self.plain.zero_grad()
        self.gradients, self.unfinished = "means", False

    def restore_buffers(self) -> None:
        """Undo what a forward or a recomputation has written into buffers before its backward was refused."""
        if self.ours.is_member:
            known = dict(self.plain.models[self.rank].named_buffers())
            for name, buffer in self.ours.engine.module.named_buffers():
                buffer.copy_(known[name])


@contextlib.contextmanager
def quiet(engine: AnyEngine, wanted: bool) -> Iterator[None]:
    with engine.no_sync() if wanted else contextlib.nullcontext():
        yield


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return on_modules + sum(len(getattr(tensor, kind) or ()) for tensor in model.parameters() for kind in kinds)


def copied(value: Any) -> Any:
    return copy.deepcopy(value)


def _place(mesh: Mesh) -> int:
    """A number of its own for every rank of a mesh."""
    place = 0
    for comm in mesh.communicators:
        place = place * comm.num_ranks + comm.rank
    return place
