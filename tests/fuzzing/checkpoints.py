"""Checkpoints: save, and load into this engine or into another one, on as many ranks or not."""

from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.operation import Operation
from tests.fuzzing.optimizers import WHOLE
from tests.fuzzing.world import Seen, World, copied


class Save(Operation, peers=False):
    """``engine.save(directory)``; of several meshes at once each saves into its own, and the first one's is loaded."""

    def ours(self, world: World) -> None:
        assert world.directory is not None
        folder = world.directory / str(world.ours.mesh.ranks[0])
        world.ours.engine.save(folder, scheduler=world.ours.scheduler, extra={"number": 1})

    def plain(self, world: World) -> None:
        plain = world.plain
        world.saved = {
            "folder": str(world.ours.spec.ranks(0, world.meshes.num_ranks)[0]),
            "state": plain.state(0),  # the first rank's buffers
            "optimizer": copied(plain.optimizer.state_dict()),
            "scheduler": copied(plain.scheduler.state_dict()),
            "num_steps": plain.num_steps,
        }

    def after(self, world: World) -> None:
        if world.unfinished:
            world.settle()


class Load(Operation, peers=False, drops=True):
    """``engine.load(directory)``; with ``into``, a fresh engine of that kind takes the place of this one.

    Losses that wait are forgotten, as the gradients are.
    """

    into: EngineSpec | None = None

    def applies(self, world: World) -> bool:
        if not world.saved or (self.into is not None and not _can_begin(self.into, world)):
            return False
        now = world.plain.fresh_groups if self.into is not None else len(world.plain.optimizer.param_groups)
        return len(world.saved["optimizer"]["param_groups"]) == now == len(world.plain.optimizer.param_groups)

    def takes_part(self, world: World) -> bool:
        return world.ours.is_member or (self.into is not None and world.meshes.of(self.into).is_member)

    def prepare(self, world: World) -> None:
        if self.into is not None:
            world.meshes.of(self.into)
            if self.into.leaves_out(world.meshes.num_ranks) or world.has_absent:
                world.ours.kept.clear()  # who was absent has kept nothing
                world.plain.kept.clear()

    def ours(self, world: World) -> Seen:
        ours = world.ours
        if self.into is not None:
            training = world.plain.models[0].training
            ours.move(self.into, world.meshes.of(self.into), world.plain.scale)
        if not ours.is_member:
            return {}
        if self.into is not None:
            ours.engine.module.train(training)
        assert world.directory is not None
        extra = ours.engine.load(world.directory / world.saved["folder"], scheduler=ours.scheduler)
        return {"extra": extra}

    def plain(self, world: World) -> Seen:
        plain = world.plain
        if self.into is not None:
            plain.resize(self.into.num_data_ranks)
        plain.load(world.saved["state"])
        plain.optimizer.load_state_dict(copied(world.saved["optimizer"]))
        plain.scheduler.load_state_dict(copied(world.saved["scheduler"]))
        plain.num_steps = world.saved["num_steps"]
        plain.zero_grad()
        return {"extra": {"number": 1}} if world.ours.is_member else {}

    def after(self, world: World) -> None:
        world.settle()
        if self.into is not None:
            world.plain.thaw()
            world.ours.spec = self.into  # also where this rank takes no part, before or after


def _can_begin(engine: EngineSpec, world: World) -> bool:
    """Whether there are ranks for another engine, and none leaves if it may refuse the optimizer: it would not hear."""
    leaves_out = engine.leaves_out(world.meshes.num_ranks)
    may_be_refused = world.ours.optimizer_spec.kind in WHOLE
    return engine.num_ranks <= world.meshes.num_ranks and not (leaves_out and may_be_refused)
