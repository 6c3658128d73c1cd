"""What users do with states: full parameters, state dicts out and in, checkpoints, another engine, habits of torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardlab.engines.fsdp import FSDP
from tests.fuzzing.engines import LEFT_OUT, EngineSpec
from tests.fuzzing.operations import Operation, evaluating
from tests.fuzzing.world import Seen, World, copied


@dataclass(frozen=True)
class AddGroup(Operation):
    """The parameter that the optimizer was not given, in a group of its own."""

    def applies(self, world: World) -> bool:
        stepped = [param for group in world.plain.optimizer.param_groups for param in group["params"]]
        return all(param is not world.plain.params[LEFT_OUT] for param in stepped)

    def ours(self, world: World) -> Seen:
        tensor = world.ours.engine.step_tensors().by_name(LEFT_OUT)
        world.ours.engine.optimizer.add_param_group({"params": [tensor], "lr": 0.02})
        return {}

    def plain(self, world: World) -> Seen:
        world.plain.optimizer.add_param_group({"params": [world.plain.params[LEFT_OUT]], "lr": 0.02})
        return {}


@dataclass(frozen=True)
class FullParams(Operation):
    """Inside ``full_params()``: 'look' at the parameters, 'change' them, 'evaluate' or 'train' with the engine."""

    keep: bool = False
    inside: str = "look"
    seed: int = 0
    peers: ClassVar[bool] = False

    def applies(self, world: World) -> bool:
        return hasattr(world.ours.engine, "full_params")

    def ours(self, world: World) -> Seen:
        engine = world.ours.engine
        with engine.full_params(keep_changes=self.keep) as model:
            seen: Seen = {name: param.detach().clone() for name, param in model.named_parameters()}
            if self.inside == "change" and self.keep:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
            elif self.inside == "evaluate":
                with evaluating(model, True):
                    seen["output"] = world.ours.forward(self.seed)[1]
            elif self.inside == "train":
                loss, seen["output"] = world.ours.forward(self.seed)
                engine.backward(loss)
        return seen

    def plain(self, world: World) -> Seen:
        plain = world.plain
        seen: Seen = {name: param.detach().clone() for name, param in plain.params.items()}
        if self.inside == "change" and self.keep:
            plain.losses.clear()
            with torch.no_grad():
                for param in plain.params.values():
                    param.mul_(0.9)
        elif self.inside == "evaluate":
            before = plain.models[0].training
            for model in plain.models:
                model.eval()
            with torch.no_grad():
                seen["output"] = plain.forward(self.seed, world.rank)[1]
            for model in plain.models:
                model.train(before)
        elif self.inside == "train":
            loss, seen["output"] = plain.forward(self.seed, world.rank)
            plain.backward(loss)
        return seen

    def after(self, world: World) -> None:
        if self.inside == "change" and self.keep:
            world.ours.losses.clear()
        if self.inside == "train":
            world.gradients, world.unfinished = "means", False
        world.gathered = False


@dataclass(frozen=True)
class StateOut(Operation):
    """``full_state_dict()``, compared and kept."""

    def ours(self, world: World) -> Seen:
        world.ours.kept["state"] = state = world.ours.engine.full_state_dict()
        return copied(state)

    def plain(self, world: World) -> Seen:
        world.plain.kept["state"] = state = world.plain.state(0)  # the first rank's buffers
        return copied(state)

    def after(self, world: World) -> None:
        world.gathered = False


@dataclass(frozen=True)
class StateIn(Operation):
    """``load_full_state_dict()`` of what ``StateOut`` has kept. Losses that wait are forgotten."""

    def applies(self, world: World) -> bool:
        return "state" in world.plain.kept

    def ours(self, world: World) -> Seen:
        world.ours.losses.clear()
        world.ours.engine.load_full_state_dict(world.ours.kept["state"])
        return {}

    def plain(self, world: World) -> Seen:
        world.plain.losses.clear()
        world.plain.load(world.plain.kept["state"])
        return {}

    def after(self, world: World) -> None:
        world.gathered = False


@dataclass(frozen=True)
class OptimizerOut(Operation):
    """``full_optimizer_state_dict()``, compared and kept."""

    peers: ClassVar[bool] = False

    def ours(self, world: World) -> Seen:
        world.ours.kept["optimizer"] = state = world.ours.engine.full_optimizer_state_dict()
        return flat(state)

    def plain(self, world: World) -> Seen:
        world.plain.kept["optimizer"] = state = copied(world.plain.optimizer.state_dict())
        return flat(state)

    def after(self, world: World) -> None:
        if world.unfinished:
            world.gradients, world.unfinished, world.gathered = "means", False, False


@dataclass(frozen=True)
class OptimizerIn(Operation):
    """``load_full_optimizer_state_dict()`` of what ``OptimizerOut`` has kept."""

    peers: ClassVar[bool] = False

    def applies(self, world: World) -> bool:
        return "optimizer" in world.plain.kept and len(world.plain.kept["optimizer"]["param_groups"]) == len(
            world.plain.optimizer.param_groups
        )

    def ours(self, world: World) -> Seen:
        world.ours.engine.load_full_optimizer_state_dict(world.ours.kept["optimizer"])
        return {}

    def plain(self, world: World) -> Seen:
        world.plain.optimizer.load_state_dict(copied(world.plain.kept["optimizer"]))
        return {}


def flat(state: dict[str, Any]) -> Seen:
    """An optimizer's state dict as one level of names."""
    found = {f"state {number} {key}": v for number, held in state["state"].items() for key, v in held.items()}
    for number, group in enumerate(state["param_groups"]):
        found |= {f"group {number} {key}": v for key, v in group.items() if key in ("lr", "weight_decay", "params")}
    return found


@dataclass(frozen=True)
class Save(Operation):
    """``engine.save(directory)``."""

    peers: ClassVar[bool] = False

    def ours(self, world: World) -> Seen:
        assert world.directory is not None
        world.ours.engine.save(world.directory, scheduler=world.ours.scheduler, extra={"number": 1})
        return {}

    def plain(self, world: World) -> Seen:
        plain = world.plain
        world.saved = {
            "state": plain.state(0),  # the first rank's buffers
            "optimizer": copied(plain.optimizer.state_dict()),
            "scheduler": copied(plain.scheduler.state_dict()),
            "num_steps": plain.num_steps,
        }
        return {}

    def after(self, world: World) -> None:
        if world.unfinished:
            world.gradients, world.unfinished, world.gathered = "means", False, False


@dataclass(frozen=True)
class Load(Operation):
    """``engine.load(directory)``; with ``into``, a fresh engine of that kind takes the place of this one.

    Losses that wait are forgotten, as the gradients are.
    """

    into: EngineSpec | None = None
    peers: ClassVar[bool] = False

    def applies(self, world: World) -> bool:
        if not world.saved or (self.into is not None and self.into.num_ranks != world.ours.spec.num_ranks):
            return False
        now = world.plain.fresh_groups if self.into is not None else len(world.plain.optimizer.param_groups)
        return len(world.saved["optimizer"]["param_groups"]) == now == len(world.plain.optimizer.param_groups)

    def ours(self, world: World) -> Seen:
        ours = world.ours
        ours.losses.clear()
        if self.into is not None:
            ours.move(self.into)
            world.held.clear()
        extra = ours.engine.load(world.directory, scheduler=ours.scheduler)
        return {"extra": extra}

    def plain(self, world: World) -> Seen:
        plain = world.plain
        plain.losses.clear()
        if self.into is not None:
            plain.thaw()
        plain.load(world.saved["state"])
        plain.optimizer.load_state_dict(copied(world.saved["optimizer"]))
        plain.scheduler.load_state_dict(copied(world.saved["scheduler"]))
        plain.num_steps = world.saved["num_steps"]
        plain.zero_grad()
        return {"extra": {"number": 1}}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished, world.gathered = "means", False, False


@dataclass(frozen=True)
class Hold(Operation):
    """Gather a unit of FSDP by hand and hold it, or let it go."""

    unit: int = 0
    hold: bool = True
    peers: ClassVar[bool] = False

    def applies(self, world: World) -> bool:
        return isinstance(world.ours.engine, FSDP)

    def ours(self, world: World) -> Seen:
        engine = world.ours.engine
        assert isinstance(engine, FSDP)
        name = engine.units[self.unit % len(engine.units)].name
        (engine.unshard if self.hold else engine.reshard)(name)
        (world.held.add if self.hold else world.held.discard)(name)
        return {}

    def plain(self, world: World) -> Seen:
        return {}


@dataclass(frozen=True)
class Habit(Operation):
    """A habit of plain torch: right, or refused with the line to write instead.

    Attributes:
        what: 'optimizer.step', 'module.zero_grad', 'optimizer.zero_grad', 'clip module' or 'clip step tensors'.
    """

    what: str = "optimizer.step"
    is_habit: ClassVar[bool] = True

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
            return {"norm": torch.nn.utils.clip_grad_norm_(tensors, 1.0)}
        return {}

    def plain(self, world: World) -> Seen:
        plain = world.plain
        if self.what == "optimizer.step":
            plain.losses.clear()
            plain.optimizer.step()
        elif self.what.endswith("zero_grad"):
            plain.zero_grad()
        else:
            return {"norm": torch.nn.utils.clip_grad_norm_(list(plain.params.values()), 1.0)}
        return {}

    def after(self, world: World) -> None:
        if self.what.endswith("zero_grad"):
            world.gradients, world.unfinished = "means", False
