"""What users do with states: full parameters, state dicts out and in."""

from typing import Any

import torch

from tests.fuzzing.between import evaluated, evaluating
from tests.fuzzing.operation import Operation
from tests.fuzzing.world import Seen, World, copied


class FullParams(Operation, peers=False):
    """Inside ``full_params()``: 'look' at parameters, 'change' or 'replace' them, 'evaluate' or 'train' the engine.

    'borrow' replaces them, and then puts back the memory that was there.
    """

    keep: bool = False
    inside: str = "look"
    seed: int = 0

    @property
    def changes(self) -> bool:
        return self.inside in ("change", "replace", "borrow") and self.keep

    def ours(self, world: World) -> Seen:
        engine = world.ours.engine
        with engine.full_params(keep_changes=self.keep) as model:
            seen: Seen = {name: param.detach().clone() for name, param in model.named_parameters()}
            borrowed = [param.data for param in model.parameters() if self.inside == "borrow"]
            if self.changes:
                with torch.no_grad():
                    for param in model.parameters():
                        if self.inside == "change":
                            param.mul_(0.9)
                        else:
                            param.data = param.data * 0.9
            elif self.inside == "evaluate":
                with evaluating(model, True):
                    seen["output"] = world.ours.forward(self.seed)[1]
            elif self.inside == "train":
                loss, seen["output"] = world.ours.forward(self.seed)
                engine.backward(loss)
        if self.changes and self.inside == "borrow":
            with engine.full_params(keep_changes=True) as model:
                for param, data in zip(model.parameters(), borrowed, strict=True):
                    param.data = data
        if self.inside == "evaluate" and world.ours.spec.rounds:
            engine.full_state_dict()  # raises what the forward is refused for, of which no exchange has told yet
        return seen

    def plain(self, world: World) -> Seen:
        plain = world.plain
        seen: Seen = {name: param.clone() for name, param in world.own(plain.detached()).items()}
        if self.changes:
            plain.losses.clear()
            with torch.no_grad():
                for param in plain.params.values() if self.inside != "borrow" else ():
                    param.mul_(0.9)
        elif self.inside == "evaluate":
            seen["output"] = evaluated(world, self.seed)[1]
        elif self.inside == "train":
            loss, seen["output"] = plain.forward(self.seed, world.rank)
            plain.backward(loss)
        return seen

    def after(self, world: World) -> None:
        if self.changes:
            world.ours.losses.clear()
        if self.inside == "train":
            world.settle()
        world.gathered = False


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


class StateIn(Operation, drops=True):
    """``load_full_state_dict()`` of what ``StateOut`` has kept. Losses that wait are forgotten."""

    def applies(self, world: World) -> bool:
        return "state" in world.plain.kept

    def ours(self, world: World) -> None:
        world.ours.engine.load_full_state_dict(world.ours.kept["state"])

    def plain(self, world: World) -> None:
        world.plain.load(world.plain.kept["state"])

    def after(self, world: World) -> None:
        world.gathered = False


class OptimizerOut(Operation, peers=False):
    """``full_optimizer_state_dict()``, compared and kept."""

    def ours(self, world: World) -> Seen:
        world.ours.kept["optimizer"] = state = world.ours.engine.full_optimizer_state_dict()
        return flat(state)

    def plain(self, world: World) -> Seen:
        world.plain.kept["optimizer"] = state = copied(world.plain.optimizer.state_dict())
        return flat(state)

    def after(self, world: World) -> None:
        if world.unfinished:
            world.settle()


class OptimizerIn(Operation, peers=False):
    """``load_full_optimizer_state_dict()`` of what ``OptimizerOut`` has kept."""

    def applies(self, world: World) -> bool:
        return "optimizer" in world.plain.kept and len(world.plain.kept["optimizer"]["param_groups"]) == len(
            world.plain.optimizer.param_groups
        )

    def ours(self, world: World) -> None:
        world.ours.engine.load_full_optimizer_state_dict(world.ours.kept["optimizer"])

    def plain(self, world: World) -> None:
        world.plain.optimizer.load_state_dict(copied(world.plain.kept["optimizer"]))


class NamedOut(Operation, peers=False):
    """``named_optimizer_state()``, compared and kept."""

    def ours(self, world: World) -> Seen:
        world.ours.kept["named"] = state = world.ours.engine.named_optimizer_state()
        return levelled(state)

    def plain(self, world: World) -> Seen:
        world.plain.kept["named"] = state = copied(world.plain.named_state())
        return levelled(state)

    def after(self, world: World) -> None:
        if world.unfinished:
            world.settle()


class NamedIn(Operation, peers=False):
    """``load_named_optimizer_state()`` of what ``NamedOut`` has kept."""

    def applies(self, world: World) -> bool:
        return "named" in world.plain.kept

    def ours(self, world: World) -> None:
        world.ours.engine.load_named_optimizer_state(world.ours.kept["named"])

    def plain(self, world: World) -> None:
        state, params = world.plain.optimizer.state, world.plain.params
        state.clear()
        state.update({params[name]: copied(held) for name, held in world.plain.kept["named"].items()})


class GradientsOut(Operation, peers=False, settles=True):
    """``full_gradients()``, compared."""

    def ours(self, world: World) -> Seen:
        return world.ours.engine.full_gradients()

    def plain(self, world: World) -> Seen:
        return world.plain.gradients()


def levelled(state: dict[str, dict[str, Any]]) -> Seen:
    return {f"state {name} {key}": value for name, held in state.items() for key, value in held.items()}


def flat(state: dict[str, Any]) -> Seen:
    found = {f"state {number} {key}": v for number, held in state["state"].items() for key, v in held.items()}
    for number, group in enumerate(state["param_groups"]):
        found |= {f"group {number} {key}": v for key, v in group.items() if key in ("lr", "weight_decay", "params")}
    return found
