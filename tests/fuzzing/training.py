"""The steps of a training loop: forward, backward, clip, step, and forget the gradients."""

import contextlib

import torch
from torch import Tensor

from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import TOLD, Role
from tests.fuzzing.modules import Planted
from tests.fuzzing.operation import Operation
from tests.fuzzing.refusals import refuses_parts
from tests.fuzzing.world import Seen, World, quiet


class Forward(Operation):
    """A forward whose loss waits for a backward."""

    seed: int = 0  # of the rows
    depth: int | None = None  # blocks that are called; None for all
    quiet: bool = False  # inside ``no_sync()``
    fault: str = "none"  # where the user's code raises: 'none', 'forward' or, later, 'backward'
    called: bool = False  # by ``engine.call()``

    def ours(self, world: World) -> Seen:
        with quiet(world.ours.engine, self.quiet):
            loss, output = world.ours.forward(self.seed, self.called, depth=self.depth, fault=self.fault)
        world.ours.losses.append(loss)
        return {"output": output}

    def plain(self, world: World) -> Seen:
        loss, output = world.plain.forward(self.seed, world.rank, depth=self.depth, fault=self.fault)
        world.plain.losses.append(loss)
        return {"output": output}

    def after(self, world: World) -> None:
        world.gathered = True  # what was gathered ahead in vain may stay until backward


class Backward(Operation):
    """Backward of losses that wait."""

    how: str = "engine"  # 'engine' or 'plain' (``loss.backward()``)
    which: str = "all"  # 'all', the sum of all; 'first' or 'last', whose others go on waiting
    quiet: bool = False  # inside ``no_sync()``
    retain: bool = False  # the graph, so that these losses go on waiting too

    def applies(self, world: World) -> bool:
        return bool(world.plain.losses)

    def ours(self, world: World) -> None:
        loss = take(world.ours.losses, self.which, retain=self.retain)
        world.is_plain = self.how == "plain"
        with quiet(world.ours.engine, self.quiet):
            if self.how == "engine":
                world.ours.engine.backward(loss, retain_graph=self.retain)
            else:
                loss.backward(retain_graph=self.retain)

    def plain(self, world: World) -> None:
        ranks = zip(*world.plain.losses, strict=True)
        waiting = [list(losses) for losses in ranks]
        losses = [take(losses, self.which, retain=self.retain) for losses in waiting]
        world.plain.backward(losses, retain_graph=self.retain)
        world.plain.losses[:] = [list(losses) for losses in zip(*waiting, strict=True)]

    def after(self, world: World) -> None:
        finished = self.how == "engine" and not self.quiet
        if finished or world.gradients != "changed":  # what refuses the change may be the next exchange
            world.gradients = "means" if finished else "local"
        world.unfinished = not finished and not self.quiet
        world.gathered = self.how == "plain" or (bool(world.plain.losses) and world.ours.spec.keeps_gathered)


def take(losses: list[Tensor], which: str, *, retain: bool = False) -> Tensor:
    """The loss to call backward on; it waits no longer, unless its graph is retained."""
    place = 0 if which == "first" else -1
    loss = torch.stack(losses).sum() if which == "all" else losses[place]
    if not retain:
        losses[:] = [] if which == "all" else losses[1:] if which == "first" else losses[:-1]
    return loss


class Clip(Operation, settles=True):
    """Clipping by the engine; ``norm_type`` is 1, 2 or 'inf'."""

    max_norm: float = 1.0
    norm_type: float | str = 2.0

    def ours(self, world: World) -> Seen:
        return {"norm": world.ours.engine.clip_grad_norm_(self.max_norm, float(self.norm_type))}

    def plain(self, world: World) -> Seen:
        params = list(world.plain.params.values())
        return {"norm": torch.nn.utils.clip_grad_norm_(params, self.max_norm, float(self.norm_type))}


class Step(Operation, steps=True):
    """An optimizer step; ``drops``: losses that wait are forgotten before, since their weights are no longer there."""

    drops: bool = True

    def ours(self, world: World) -> None:
        world.ours.engine.step()

    def plain(self, world: World) -> None:
        world.plain.step()


class ZeroGrad(Operation):
    """Forget all gradients; ``zeros``: by zeros in their places."""

    zeros: bool = False

    def ours(self, world: World) -> Seen:
        world.ours.engine.zero_grad(set_to_none=not self.zeros)
        if self.zeros:
            return {}
        held = bytes_by_role(world.ours.engine.live_tensors())[Role.GRADIENT]
        keeps = world.ours.spec.kind in ("bucketed", "zero1")  # the buckets, whose memory is used again
        return {"bytes of gradients": 0 if keeps else held}

    def plain(self, world: World) -> Seen:
        if self.zeros:
            for param in world.plain.params.values():
                if param.grad is not None:
                    param.grad.zero_()
            return {}
        world.plain.zero_grad()
        return {"bytes of gradients": 0}

    def after(self, world: World) -> None:
        world.gradients, world.unfinished = "means", False
        world.has_stale = world.has_stale or bool(world.plain.losses)


class Finish(Operation, settles=True):
    """``finish_gradients()`` by hand."""

    def ours(self, world: World) -> None:
        world.ours.engine.finish_gradients()


class ScaledStep(Operation, peers=False, drops=True, settles=True):
    """A step with loss scaling; where ``overflow``, a loss of one rank is infinite, and every rank skips the step."""

    seed: int = 0
    overflow: bool = False

    def ours(self, world: World) -> Seen:
        ours = world.ours
        ours.engine.zero_grad()
        loss, output = ours.forward(self.seed)
        if self.overflow and world.rank == len(world.plain.models) - 1:
            loss = loss * float("inf")
        ours.engine.backward(ours.scaler.scale(loss))
        stepped = ours.scaler.step(ours.engine)
        ours.engine.zero_grad()
        return {"output": output, "stepped": stepped, "scale": ours.scaler.current_scale}

    def plain(self, world: World) -> Seen:
        plain = world.plain
        plain.zero_grad()
        loss, output = plain.forward(self.seed, world.rank)
        plain.backward(loss)
        if self.overflow:
            plain.scale *= 0.5
        else:
            plain.step()
        plain.zero_grad()
        return {"output": output, "stepped": not self.overflow, "scale": plain.scale}


class FailsAlone(Operation, peers=False, drops=True):
    """Forward and backward, where the user's code raises on one data rank only; all go on with the next batch.

    Where a forward sends nothing, the user's loop tells the other ranks of an error in it, and none calls a backward.
    Where it gathers parameters the others wait for this rank, which begins again: then two collectives may meet. Over
    gloo, which does not look at what meets, they would wait until time is up; so would replicas of theirs, which see
    nothing of what has met.
    """

    seed: int = 0  # of the rows
    on: int = 0  # the data rank, modulo their number
    fault: str = "backward"  # where, 'forward' or 'backward'
    how: str = "engine"  # as in ``Backward``
    quiet: bool = False  # inside ``no_sync()``

    def applies(self, world: World) -> bool:
        raises = any(block.kind == "overwrite" for block in world.ours.module_spec.blocks)  # on the other ranks too
        spec = world.ours.spec
        # Inside no_sync() the pass ends without the reductions in which the ranks would meet.
        return not (raises or (spec.gathers and (self.quiet or spec.transport == "gloo" or spec.has_replicas)))

    def ours(self, world: World) -> None:
        ours, fails = world.ours, world.rank == self.on % world.ours.spec.num_data_ranks
        world.left_alone = ours.spec.gathers
        ours.engine.zero_grad()
        try:
            self._pass(world, self.fault if fails else "none")
        except Planted:
            ours.engine.zero_grad()
            if self.fault == "forward" and ours.spec.gathers:
                self._pass(world, "none")
        except RuntimeError as error:
            # A rank that has come so far as to refuse its own part says that, and not that another raised.
            if fails or not (TOLD in str(error) or refuses_parts(error, world)):
                raise
        ours.engine.zero_grad()

    def _pass(self, world: World, fault: str) -> None:
        with quiet(world.ours.engine, self.quiet):
            loss, _ = world.ours.forward(self.seed, fault=fault)
            if self.fault == "forward" and not world.ours.spec.gathers:
                return
            if self.how == "engine":
                world.ours.engine.backward(loss)
            else:
                loss.backward()

    def plain(self, world: World) -> None:
        plain = world.plain
        on, again = self.on % len(plain.models), self.fault == "forward" and world.ours.spec.gathers
        with contextlib.suppress(Planted):
            if again:
                plain.forward(self.seed, on, fault=self.fault, only=on)
        with contextlib.suppress(Planted):
            losses, _ = plain.forward(self.seed, world.rank, fault="none" if again else self.fault, on=on)
            plain.backward(losses)
        plain.zero_grad()

    def after(self, world: World) -> None:
        world.gradients, world.unfinished, world.gathered, world.left_alone = "means", False, True, False
