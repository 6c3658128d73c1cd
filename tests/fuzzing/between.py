"""What users do between the steps of training: evaluate, freeze, set modes and rates; and habits."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tests.fuzzing.engines import PEERS
from tests.fuzzing.operation import Operation
from tests.fuzzing.optimizers import LEFT_OUT
from tests.fuzzing.world import Losses, Seen, World


class Evaluate(Operation):
    """A forward without gradients, in evaluation mode or not, by ``no_grad`` or by ``inference_mode``."""

    seed: int = 0
    depth: int | None = None
    mode: bool = True
    inference: bool = False

    def ours(self, world: World) -> Seen:
        with evaluating(world.ours.engine.module, self.mode, inference=self.inference):
            loss, output = world.ours.forward(self.seed, depth=self.depth)
        return {"output": output, "loss needs a gradient": loss.requires_grad}

    def plain(self, world: World) -> Seen:
        loss, output = evaluated(world, self.seed, self.depth, self.mode, inference=self.inference)
        return {"output": output, "loss needs a gradient": loss[world.rank].requires_grad}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module, mode: bool, *, inference: bool = False) -> Iterator[None]:
    """Without gradients, and with ``mode`` as an evaluation does it."""
    before = model.training
    model.train(before and not mode)
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            yield
    finally:
        model.train(before)


def evaluated(
    world: World, seed: int, depth: int | None = None, mode: bool = True, *, inference: bool = False
) -> tuple[Losses, Tensor]:
    with contextlib.ExitStack() as stack:
        for model in world.plain.models:
            stack.enter_context(evaluating(model, mode, inference=inference))
        return world.plain.forward(seed, world.rank, depth=depth)


class Freeze(Operation):
    """Freeze (or thaw) the parameters of a part of the module, on all ranks; ``leave.bias`` always trains."""

    part: str = "enter"
    frozen: bool = True

    def ours(self, world: World) -> Seen:
        return self._set(world.ours.engine.module)

    def plain(self, world: World) -> Seen:
        return self._set(world.plain.models[0])

    def _set(self, module: torch.nn.Module) -> None:
        for name, param in module.named_parameters():
            if name.startswith(self.part) and name != LEFT_OUT:
                param.requires_grad_(not self.frozen)


class LearningRate(Operation):
    """Set the learning rate, or let the scheduler do it."""

    value: float | None = None

    def ours(self, world: World) -> None:
        if self.value is None:
            world.ours.scheduler.step()
        else:
            world.ours.engine.learning_rate = self.value

    def plain(self, world: World) -> None:
        if self.value is None:
            world.plain.scheduler.step()
        for group in world.plain.optimizer.param_groups if self.value is not None else ():
            group["lr"] = self.value


class Mode(Operation):
    """``module.train()`` or ``module.eval()``."""

    train: bool = True

    def ours(self, world: World) -> None:
        world.ours.engine.module.train(self.train)

    def plain(self, world: World) -> None:
        for model in world.plain.models:
            model.train(self.train)


class AddGroup(Operation):
    """The parameter that the optimizer was not given, in a group of its own."""

    def applies(self, world: World) -> bool:
        stepped = [param for group in world.plain.optimizer.param_groups for param in group["params"]]
        return all(param is not world.plain.params[LEFT_OUT] for param in stepped)

    def ours(self, world: World) -> None:
        tensor = world.ours.engine.step_tensors().by_name(LEFT_OUT)
        world.ours.engine.optimizer.add_param_group({"params": [tensor], "lr": 0.02})

    def plain(self, world: World) -> None:
        world.plain.optimizer.add_param_group({"params": [world.plain.params[LEFT_OUT]], "lr": 0.02})


class ChangeMeans(Operation, peers=False):
    """Clear or scale by hand the mean gradients of a part, where the optimizer will find them."""

    part: str = "enter"
    clear: bool = True

    def applies(self, world: World) -> bool:
        return world.gradients == "means" and not world.unfinished

    def ours(self, world: World) -> Seen:
        seen = self._change(world.ours.engine.step_tensors().items())
        world.ours.engine.means_changed()  # or it could be torch's clipping
        return seen

    def plain(self, world: World) -> Seen:
        return self._change(world.plain.params.items())

    def _change(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name.startswith(self.part) and tensor.grad is not None:
                tensor.grad = None if self.clear else tensor.grad.mul_(0.5)


class Habit(Operation, is_habit=True):
    """A habit of plain torch: right, or refused with the line to write instead."""

    # 'optimizer.step', 'module.zero_grad', 'optimizer.zero_grad', 'clip module' or 'clip step tensors'
    what: str = "optimizer.step"

    def applies(self, world: World) -> bool:
        # Torch's engines clip each rank's own gradients by their own norm where no_sync() has left them.
        return not (self._clips_parts(world) and world.ours.spec.name in PEERS)

    def _clips_parts(self, world: World) -> bool:
        """Whether the norm on each rank is of its own sums, or of its slices."""
        are_sums = world.gradients != "means" and not world.unfinished
        return self.what.startswith("clip") and (are_sums or world.ours.spec.num_tensor_ranks > 1)

    def ours(self, world: World) -> Seen:
        engine = world.ours.engine
        if self.what == "optimizer.step":
            engine.optimizer.step()
            world.ours.losses.clear()  # only if it was not declined
        elif self.what == "module.zero_grad":
            engine.module.zero_grad()
        elif self.what == "optimizer.zero_grad":
            engine.optimizer.zero_grad()
        else:
            tensors = engine.module.parameters() if self.what == "clip module" else engine.step_tensors()
            norm = torch.nn.utils.clip_grad_norm_(tensors, 1.0)
            return {} if self._clips_parts(world) else {"norm": norm}
        return {}

    def plain(self, world: World) -> Seen:
        plain = world.plain
        if self.what == "optimizer.step":
            plain.losses.clear()
            plain.optimizer.step()
        elif self.what.endswith("zero_grad"):
            plain.zero_grad()
        else:
            norm = torch.nn.utils.clip_grad_norm_(list(plain.params.values()), 1.0)
            return {} if self._clips_parts(world) else {"norm": norm}
        return {}

    def after(self, world: World) -> None:
        if self._clips_parts(world):
            world.gradients = "changed"  # what needs them next must refuse them, or they are not those of one process
        if self.what.endswith("zero_grad"):
            world.gradients, world.unfinished = "means", False
            world.has_stale = world.has_stale or bool(world.plain.losses)
