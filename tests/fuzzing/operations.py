"""What users do, each done by an engine on every rank and by one process of plain torch.

An operation is plain data. ``ours`` and ``plain`` return what the user sees, under the same names; both are called on
every rank, ours first. ``applies`` says whether it makes sense now, the same on all ranks; else it is skipped.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tests.fuzzing.engines import LEFT_OUT
from tests.fuzzing.world import Ours, Plain, Seen, World, quiet


@dataclass(frozen=True)
class Operation:
    """One thing a user does.

    Attributes:
        refusable: whether plain torch does it and an engine may refuse it, with nothing changed.
        is_habit: whether it is a habit of plain torch which an engine may refuse in any case.
        peers: whether torch's engines take part.
    """

    is_habit: ClassVar[bool] = False
    peers: ClassVar[bool] = True

    def applies(self, world: World) -> bool:
        """Whether it makes sense now."""
        return True

    def ours(self, world: World) -> Seen:
        """The engine does it."""
        raise NotImplementedError

    def plain(self, world: World) -> Seen:
        """One process does it."""
        raise NotImplementedError

    def after(self, world: World) -> None:
        """What is known now, when both have done it."""


@dataclass(frozen=True)
class Forward(Operation):
    """A forward whose loss waits for a backward.

    Attributes:
        seed: of the rows.
        depth: blocks that are called; None for all.
        quiet: inside ``no_sync()``.
        fault: where the user's code raises: 'none', 'forward' or, later, 'backward'.
    """

    seed: int = 0
    depth: int | None = None
    quiet: bool = False
    fault: str = "none"

    def ours(self, world: World) -> Seen:
        with quiet(world.ours.engine, self.quiet):
            loss, output = world.ours.forward(self.seed, depth=self.depth, fault=self.fault)
        world.ours.losses.append(loss)
        return {"output": output}

    def plain(self, world: World) -> Seen:
        loss, output = world.plain.forward(self.seed, world.rank, depth=self.depth, fault=self.fault)
        world.plain.losses.append(loss)
        return {"output": output}

    def after(self, world: World) -> None:
        world.gathered = True  # what was gathered ahead in vain may stay until backward


@dataclass(frozen=True)
class Evaluate(Operation):
    """A forward without gradients, in evaluation mode or not."""

    seed: int = 0
    depth: int | None = None
    mode: bool = True

    def ours(self, world: World) -> Seen:
        with evaluating(world.ours.engine.module, self.mode):
            loss, output = world.ours.forward(self.seed, depth=self.depth)
        return {"output": output, "loss needs a gradient": loss.requires_grad}

    def plain(self, world: World) -> Seen:
        with contextlib.ExitStack() as stack:
            for model in world.plain.models:
                stack.enter_context(evaluating(model, self.mode))
            loss, output = world.plain.forward(self.seed, world.rank, depth=self.depth)
        return {"output": output, "loss needs a gradient": loss[world.rank].requires_grad}

    def after(self, world: World) -> None:
        world.gathered = True


@contextlib.contextmanager
def evaluating(model: torch.nn.Module, mode: bool) -> Iterator[None]:
    """Without gradients, and with ``mode`` as an evaluation does it."""
    before = model.training
    model.train(before and not mode)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


@dataclass(frozen=True)
class Backward(Operation):
    """Backward of losses that wait.

    Attributes:
        how: 'engine' or 'plain' (``loss.backward()``).
        which: 'all', the sum of all; 'first' or 'last', whose others go on waiting.
        quiet: inside ``no_sync()``.
    """

    how: str = "engine"
    which: str = "all"
    quiet: bool = False

    def applies(self, world: World) -> bool:
        return bool(world.plain.losses)

    def ours(self, world: World) -> Seen:
        loss = take(world.ours.losses, self.which)
        with quiet(world.ours.engine, self.quiet):
            if self.how == "engine":
                world.ours.engine.backward(loss)
            else:
                loss.backward()
        return {}

    def plain(self, world: World) -> Seen:
        ranks = zip(*world.plain.losses, strict=True)
        waiting = [list(losses) for losses in ranks]
        world.plain.backward([take(losses, self.which) for losses in waiting])
        world.plain.losses[:] = [list(losses) for losses in zip(*waiting, strict=True)]
        return {}

    def after(self, world: World) -> None:
        finished = self.how == "engine" and not self.quiet
        world.gradients = "means" if finished else "local"
        world.unfinished = not finished and not self.quiet
        world.gathered = self.how == "plain" or (bool(world.plain.losses) and world.ours.spec.keeps_gathered)


def take(losses: list[Tensor], which: str) -> Tensor:
    """The loss to call backward on; it waits no longer."""
    if which == "all":
        loss = torch.stack(losses).sum()
        losses.clear()
        return loss
    return losses.pop(0 if which == "first" else -1)


@dataclass(frozen=True)
class Clip(Operation):
    """Clipping by the engine; ``norm_type`` is 1, 2 or 'inf'."""

    max_norm: float = 1.0
    norm_type: float | str = 2.0

    def ours(self, world: World) -> Seen:
        return {"norm": world.ours.engine.clip_grad_norm_(self.max_norm, float(self.norm_type))}

    def plain(self, world: World) -> Seen:
        params = list(world.plain.params.values())
        return {"norm": torch.nn.utils.clip_grad_norm_(params, self.max_norm, float(self.norm_type))}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished = "means", False
        world.gathered = bool(world.plain.losses) and world.ours.spec.keeps_gathered


@dataclass(frozen=True)
class Step(Operation):
    """An optimizer step; ``drops``: losses that wait are forgotten before, since their weights are no longer there."""

    drops: bool = True

    def ours(self, world: World) -> Seen:
        if self.drops:
            world.ours.losses.clear()
        world.ours.engine.step()
        return {}

    def plain(self, world: World) -> Seen:
        if self.drops:
            world.plain.losses.clear()
        world.plain.optimizer.step()
        world.plain.num_steps += 1
        return {}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished, world.may_clash = "means", False, not self.drops
        world.gathered = bool(world.plain.losses) and world.ours.spec.keeps_gathered


@dataclass(frozen=True)
class ZeroGrad(Operation):
    """Forget all gradients."""

    def ours(self, world: World) -> Seen:
        world.ours.engine.zero_grad()
        return {}

    def plain(self, world: World) -> Seen:
        world.plain.zero_grad()
        return {}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished = "means", False


@dataclass(frozen=True)
class Finish(Operation):
    """``finish_gradients()`` by hand."""

    def ours(self, world: World) -> Seen:
        world.ours.engine.finish_gradients()
        return {}

    def plain(self, world: World) -> Seen:
        return {}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished = "means", False
        world.gathered = bool(world.plain.losses) and world.ours.spec.keeps_gathered


@dataclass(frozen=True)
class Freeze(Operation):
    """Freeze (or thaw) the parameters of a part of the module, on all ranks; ``leave.bias`` always trains."""

    part: str = "enter"
    frozen: bool = True

    def ours(self, world: World) -> Seen:
        return self._set(world.ours.engine.module)

    def plain(self, world: World) -> Seen:
        return self._set(world.plain.models[0])

    def _set(self, module: torch.nn.Module) -> Seen:
        for name, param in module.named_parameters():
            if name.startswith(self.part) and name != LEFT_OUT:
                param.requires_grad_(not self.frozen)
        return {}


@dataclass(frozen=True)
class LearningRate(Operation):
    """Set the learning rate, or let the scheduler do it."""

    value: float | None = None

    def ours(self, world: World) -> Seen:
        if self.value is None:
            world.ours.scheduler.step()
        else:
            world.ours.engine.learning_rate = self.value
        return {}

    def plain(self, world: World) -> Seen:
        if self.value is None:
            world.plain.scheduler.step()
        for group in world.plain.optimizer.param_groups if self.value is not None else ():
            group["lr"] = self.value
        return {}


@dataclass(frozen=True)
class Mode(Operation):
    """``module.train()`` or ``module.eval()``."""

    train: bool = True

    def ours(self, world: World) -> Seen:
        world.ours.engine.module.train(self.train)
        return {}

    def plain(self, world: World) -> Seen:
        for model in world.plain.models:
            model.train(self.train)
        return {}


@dataclass(frozen=True)
class ScaledStep(Operation):
    """A step with loss scaling; where ``overflow``, a loss of one rank is infinite, and every rank skips the step."""

    seed: int = 0
    overflow: bool = False
    peers: ClassVar[bool] = False

    def ours(self, world: World) -> Seen:
        ours: Ours = world.ours
        ours.losses.clear()
        ours.engine.zero_grad()
        loss, output = ours.forward(self.seed)
        if self.overflow and world.rank == len(world.plain.models) - 1:
            loss = loss * float("inf")
        ours.engine.backward(ours.scaler.scale(loss))
        stepped = ours.scaler.step(ours.engine)
        ours.engine.zero_grad()
        return {"output": output, "stepped": stepped, "scale": ours.scaler.current_scale}

    def plain(self, world: World) -> Seen:
        plain: Plain = world.plain
        plain.losses.clear()
        plain.zero_grad()
        loss, output = plain.forward(self.seed, world.rank)
        plain.backward(loss)
        if self.overflow:
            plain.scale *= 0.5
        else:
            plain.optimizer.step()
            plain.num_steps += 1
        plain.zero_grad()
        return {"output": output, "stepped": not self.overflow, "scale": plain.scale}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished, world.gathered = "means", False, False
