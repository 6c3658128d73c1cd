"""The two sides of a scenario: an engine on this rank, and one process of plain torch that has the rows of all ranks.

The one process averages the ranks' losses. Its modules, one for each rank, have the same parameters and buffers of
their own, since what a forward writes into a buffer stays on its rank.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, GradScaler
from shardlab.engines.step_tensors import StepTensors
from tests.fuzzing import modules
from tests.fuzzing.engines import EngineSpec, OptimizerSpec
from tests.fuzzing.modules import Model, ModuleSpec, prediction, rows

Seen = dict[str, Any]
Losses = list[Tensor]  # one for each rank
T = TypeVar("T")
R = TypeVar("R")


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The loss of one rank's rows."""
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
        losses: of forwards whose backward has not come.
        kept: what ``StateOut`` and ``OptimizerOut`` have kept.
    """

    def __init__(self, spec: EngineSpec, module: ModuleSpec, optimizer: OptimizerSpec, mesh: Mesh, rank: int) -> None:
        self.module_spec, self.optimizer_spec, self.mesh = module, optimizer, mesh
        self.build(spec, seed=rank)  # ranks that start different must be made equal by the engine
        self.scaler = GradScaler(scale=8.0)
        self.losses: list[Tensor] = []
        self.kept: Seen = {}

    @property
    def rank(self) -> int:
        """Among the data ranks."""
        return self.engine.data_rank

    def build(self, spec: EngineSpec, seed: int) -> None:
        """A fresh module with an engine around it."""
        model = modules.build(self.module_spec, seed)
        self.spec, self.hooks_before = spec, hooks_of(model)
        self.engine: Engine = spec.build(model, self._optimizer_of, self.mesh)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.engine.optimizer, step_size=1, gamma=0.8)

    def move(self, spec: EngineSpec) -> None:
        """Close this engine and begin with another, around another module of the same kind."""
        training = self.engine.module.training
        self.engine.close()
        self.build(spec, seed=7)
        self.engine.module.train(training)

    def _optimizer_of(self, tensors: StepTensors) -> torch.optim.Optimizer:
        return self.optimizer_spec.build(list(tensors.items()))

    def forward(self, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Loss and prediction of this rank's rows."""
        x, y = rows(seed, self.rank)
        output = self.engine(x, **options)
        return loss_of(output, y), prediction(output).detach()


class Plain:
    """One process, with the rows of all ranks."""

    def __init__(self, module: ModuleSpec, optimizer: OptimizerSpec, num_ranks: int) -> None:
        self.module_spec = module
        self.models: list[Model] = modules.replicas(module, num_ranks)
        self.params = dict(self.models[0].named_parameters())
        self.optimizer = optimizer.build(list(self.params.items()))
        self.fresh_groups = len(self.optimizer.param_groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.8)
        self.losses: list[Losses] = []
        self.kept: Seen = {}
        self.num_steps = 0
        self.scale = 8.0

    def forward(self, seed: int, rank: int, **options: Any) -> tuple[Losses, Tensor]:
        """The loss of every rank, and what one rank predicts."""

        def one(number: int) -> tuple[Tensor, Tensor]:
            x, y = rows(seed, number)
            output = self.models[number](x, **options)
            return loss_of(output, y), prediction(output).detach()

        found = on_all(one, range(len(self.models)))
        return [loss for loss, _ in found], found[rank][1]

    def backward(self, losses: Losses) -> None:
        """Backward of the mean of the ranks' losses, each by itself, so that an error of one keeps none from going."""
        on_all(lambda loss: (loss / len(losses)).backward(), losses)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in self.params.values():
            param.grad = None

    def state(self, rank: int) -> dict[str, Tensor]:
        """A copy of the module's state, with the buffers of one rank."""
        return {name: value.detach().clone() for name, value in self.models[rank].state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        """The state into all ranks' modules."""
        for model in self.models:
            model.load_state_dict(state, strict=True)

    def thaw(self) -> None:
        """What trains as in a fresh module."""
        for name, param in modules.build(self.module_spec).named_parameters():
            self.params[name].requires_grad_(param.requires_grad)

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies."""
        return {name: None if param.grad is None else param.grad.clone() for name, param in self.params.items()}

    def named_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name."""
        return {name: self.optimizer.state[p] for name, p in self.params.items() if p in self.optimizer.state}


@dataclass
class World:
    """Both sides and what is known of them.

    Attributes:
        ours: the engine's side.
        plain: one process.
        directory: shared by the ranks, for checkpoints; or None.
        gradients: 'means' where the engine's gradients can be compared, else 'local'.
        unfinished: a plain ``loss.backward()`` may not have been finished.
        gathered: parameters may be there in full now.
        held: units that the user has gathered by hand.
        may_clash: an error of autograd's version check may come from a step between forward and backward.
    """

    ours: Ours
    plain: Plain
    directory: Path | None = None
    gradients: str = "means"
    unfinished: bool = False
    gathered: bool = False
    held: set[str] = field(default_factory=set)
    may_clash: bool = False
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Among the data ranks."""
        return self.ours.rank

    def drop_graphs(self) -> None:
        """The user forgets the losses that wait."""
        self.ours.losses.clear()
        self.plain.losses.clear()

    def recover(self) -> None:
        """What a user does who has caught an error and goes on with the next batch."""
        self.drop_graphs()
        self.ours.engine.zero_grad()
        self.plain.zero_grad()
        self.gradients, self.unfinished = "means", False

    def snapshot(self) -> dict[str, Tensor]:
        """The one process's state before an operation, which a refusal must leave as it is."""
        return self.plain.state(self.rank)


@contextlib.contextmanager
def quiet(engine: Engine, wanted: bool) -> Iterator[None]:
    """Inside ``no_sync()``, where wanted."""
    with engine.no_sync() if wanted else contextlib.nullcontext():
        yield


def hooks_of(model: nn.Module) -> int:
    """Every hook on a module and its parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return on_modules + sum(len(getattr(tensor, kind) or ()) for tensor in model.parameters() for kind in kinds)


def copied(value: Any) -> Any:
    """A deep copy that shares no tensor."""
    return copy.deepcopy(value)
