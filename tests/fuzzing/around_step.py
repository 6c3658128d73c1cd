"""What users do around and inside a step: write in hooks and by hand, step twice, look at the model, and raise."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tests.fuzzing.modules import Planted
from tests.fuzzing.operation import Operation
from tests.fuzzing.optimizers import ends_with
from tests.fuzzing.world import Seen, World

HOOKS = ("write before", "raise before", "write after", "step again", "raise after")


@torch.no_grad()
def shrink(tensors: Iterable[Tensor]) -> None:
    """Write in place, by more than is lost in rounding."""
    for tensor in tensors:
        tensor.mul_(0.9)


def gathers_late(world: World) -> bool:
    """Whether pieces are gathered when a step has ended, and refused before that."""
    return world.ours.spec.gathers_late


def may_write(world: World) -> bool:
    """Whether all pieces that are written to are gathered: not those of frozen parameters."""
    return not gathers_late(world) or all(param.requires_grad for param in world.plain.params.values())


def step_of_nothing(world: World) -> Seen:
    """What an engine asks for that gathers late, where its pieces were written last."""
    world.ours.engine.zero_grad()
    world.ours.engine.step()
    return {}


class HookedStep(Operation, peers=False, drops=True, steps=True):
    """A step with a hook of the user's before or after it; losses that wait are forgotten before."""

    # of ``HOOKS``. 'step again' is a second optimizer, whose kernels write without raising autograd's versions
    what: str = "write before"

    def applies(self, world: World) -> bool:
        if self.what.startswith("raise"):
            return self.what != "raise after" or not gathers_late(world)
        return may_write(world)

    def ours(self, world: World) -> None:
        engine = world.ours.engine
        with self._hooked(engine.optimizer, list(engine.step_tensors())):
            engine.step()

    def plain(self, world: World) -> None:
        params = list(world.plain.params.values())
        with self._hooked(world.plain.optimizer, params):
            world.plain.optimizer.step()
        world.plain.num_steps += 1

    @contextlib.contextmanager
    def _hooked(self, optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> Iterator[None]:
        second = torch.optim.AdamW(tensors, lr=0.02, eps=0.1, fused=True)

        def do(*_: object) -> None:
            if self.what.startswith("raise"):
                raise Planted(self.what)
            if self.what == "step again":
                second.step()
            else:
                shrink([tensor for group in optimizer.param_groups for tensor in group["params"]])

        is_before = HOOKS.index(self.what) < HOOKS.index("write after")
        hook = (optimizer.register_step_pre_hook if is_before else optimizer.register_step_post_hook)(do)
        try:
            yield
        finally:
            hook.remove()


class StepThatRaises(Operation, peers=False, steps=True):
    """A step of a user's own optimizer that raises behind its update; the user goes on with the next batch."""

    drops: bool = True  # as in ``Step``

    def applies(self, world: World) -> bool:
        return world.ours.optimizer_spec.derived

    def ours(self, world: World) -> Seen:
        engine = world.ours.engine
        with ends_with(engine.optimizer, _raise), contextlib.suppress(Planted):
            engine.step()
        return step_of_nothing(world)

    def plain(self, world: World) -> None:
        plain = world.plain
        with ends_with(plain.optimizer, _raise), contextlib.suppress(Planted):
            plain.optimizer.step()
        plain.zero_grad()
        plain.num_steps += 1


def _raise() -> None:
    raise Planted("at the end of a step")


class StepThatLooks(Operation, peers=False, drops=True, steps=True):
    """A step of a user's own optimizer that evaluates the model behind its update."""

    seed: int = 0

    def applies(self, world: World) -> bool:
        return world.ours.optimizer_spec.derived and not gathers_late(world)

    @torch.no_grad()
    def ours(self, world: World) -> Seen:
        seen: Seen = {}
        with ends_with(world.ours.engine.optimizer, lambda: seen.update(output=world.ours.forward(self.seed)[1])):
            world.ours.engine.step()
        return seen

    @torch.no_grad()
    def plain(self, world: World) -> Seen:
        seen, plain = {}, world.plain
        with ends_with(plain.optimizer, lambda: seen.update(output=plain.forward(self.seed, world.rank)[1])):
            plain.optimizer.step()
        plain.num_steps += 1
        return seen


class WritePieces(Operation, peers=False, steps=True):
    """Write by hand into what the optimizer steps, in place; gradients are forgotten."""

    part: str = "enter"

    def applies(self, world: World) -> bool:
        return may_write(world)

    def ours(self, world: World) -> Seen:
        self._write(world.ours.engine.step_tensors().items())
        return step_of_nothing(world)

    def plain(self, world: World) -> None:
        self._write(world.plain.params.items())
        world.plain.zero_grad()
        world.plain.num_steps += 1

    def _write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name.startswith(self.part):
                shrink([tensor])
