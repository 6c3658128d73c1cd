"""Random pipelines: a schedule, a cut, an engine inside each stage, and what users do between steps.

One process has the rows of all data ranks and does their micro-batches one after another. A scenario here has a type of
its own, since a step is one call: no loss waits, and ``no_sync()`` has no meaning.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.launch import current
from shardlab.pipeline import Pipeline
from shardlab.schedules import Action, Kind, make_schedule
from tests.fuzzing.checks import differences, pieces
from tests.fuzzing.drawn import Menu, drawn_engine, seldom
from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.meshes import Meshes
from tests.fuzzing.modules import FEATURES, OUTPUTS, Block, BlockSpec, rows, seeded
from tests.fuzzing.optimizers import OptimizerSpec
from tests.fuzzing.parallel import make_parallel, own_part
from tests.fuzzing.refusals import Different, first_line
from tests.fuzzing.world import Plain

KINDS = ("linear", "norm", "scale", "few", "transposed", "nested", "inplace", "counter", "running", "batchnorm", "mlp")
BRANCHES = ("branch", "sometimes")
WIDTH = 4
REFUSED = (
    "have no parameters; name others in 'begins'",
    "which several stages use; give each one its own",
)


def one_after_another(_ranks: int, num_micro_batches: int, rank: int) -> list[Action]:
    """A schedule of a user's own."""
    return [Action(kind, rank, number) for number in range(num_micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]


PLANS = {"own": one_after_another}
TWO_STAGES = "interleaved"


@dataclass(frozen=True)
class PipeSpec:
    """A pipeline and the engine inside its stages, whose axes stand beside 'pipe'."""

    engine: EngineSpec = EngineSpec(axes=(("data", 1),))  # noqa: RUF009 - it is frozen
    pipe: int = 2
    plan: str = "1f1b"  # a name of shardlab's, or of ``PLANS``
    micro_batches: int = 2

    @property
    def name(self) -> str:
        return f"{self.plan} {self.engine.name}"

    @property
    def num_ranks(self) -> int:
        return self.pipe * self.engine.num_ranks

    @property
    def num_stages(self) -> int:
        return self.pipe * (1 + (self.plan == TWO_STAGES))


@dataclass(frozen=True)
class PipedModule:
    """Blocks between two layers; stages are cut between any of them."""

    blocks: tuple[BlockSpec, ...] = (BlockSpec(), BlockSpec())
    tied: bool = False  # all blocks have one weight
    shared: bool = False  # the first block comes again at the end
    frozen_enter: bool = False

    def build(self) -> nn.Sequential:
        with seeded(0):
            blocks = [Block(spec, WIDTH) for spec in self.blocks]
            enter, leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        enter.requires_grad_(not self.frozen_enter)
        for block in blocks if self.tied else ():
            block.inner.weight = blocks[0].inner.weight
        blocks += blocks[:1] if self.shared else []
        named = {"enter": enter, **{str(place): block for place, block in enumerate(blocks)}, "leave": leave}
        return nn.Sequential(OrderedDict(named)).double().to(current().device)


@dataclass(frozen=True)
class Run:
    """A step's forwards and backwards."""

    seed: int = 0
    rows_each: int = 2  # of a micro-batch
    keeps_gathered: bool = False


@dataclass(frozen=True)
class Clip:
    """By the norm of all stages."""

    max_norm: float = 0.1
    norm_type: float | str = 2.0


@dataclass(frozen=True)
class Step:
    """Of the optimizers of all stages; ``forgets`` the gradients then."""

    forgets: bool = True


@dataclass(frozen=True)
class Restore:
    """The state dict of each stage, as it is now, into the engine again, after a step."""

    seed: int = 0


@dataclass(frozen=True)
class Move:
    """A checkpoint, and on with another pipeline."""

    into: PipeSpec = PipeSpec()


@dataclass(frozen=True)
class PipeScenario:
    """What is trained, by what, and what the user does."""

    module: PipedModule = PipedModule()
    engine: PipeSpec = PipeSpec()
    optimizer: OptimizerSpec = OptimizerSpec()  # noqa: RUF009 - it is frozen
    operations: tuple[Any, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.engine.num_ranks


@st.composite
def _pipes(draw: st.DrawFn, menu: Menu) -> PipeSpec:
    pipe = draw(st.sampled_from([size for size in range(2, menu.num_ranks + 1) if menu.num_ranks % size == 0]))
    others = menu.num_ranks // pipe
    tensor = draw(st.sampled_from([1, 1, others]))
    name = draw(st.sampled_from([name for name in menu.strategies if name in INSIDE]))
    plan = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "own"]))
    number = draw(st.integers(1, 4)) * (pipe if plan == TWO_STAGES else 1)
    engine = draw(drawn_engine(name, others // tensor, tensor))
    # Modules of five parameters one rank's stages may have and another's not: then that rank alone refuses.
    options = tuple(pair for pair in engine.options if pair[0] != "precision" and pair != ("wrap", 5))
    return PipeSpec(replace(engine, options=options, guards="guards" in menu.features), pipe, plan, number)


INSIDE = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")

_blocks = st.builds(
    BlockSpec,
    st.sampled_from(["linear", *KINDS, *BRANCHES]),
    st.sampled_from(["none", "none", "none", "whole"]),
    seldom,
)
_operations = st.one_of(
    st.builds(Run, st.integers(0, 9), st.sampled_from([2, 3, 4]), seldom),
    st.builds(Clip, st.sampled_from([0.1, 1.0]), st.sampled_from([2.0, 1.0, "inf"])),
    st.builds(Step, st.sampled_from([True, True, True, False])),
    st.builds(Restore, st.integers(0, 9)),
)


@st.composite
def pipe_scenarios(draw: st.DrawFn, menu: Menu) -> PipeScenario:
    """Of as many ranks as the menu says, at least two."""
    engine = draw(_pipes(menu))
    kinds = {
        "one": _operations.map(lambda one: [one]),
        "step": st.builds(lambda run, clip: [run, clip, Step()], st.builds(Run, st.integers(0, 9)), st.builds(Clip)),
        "moved": _pipes(menu).map(lambda into: [Move(into)]),
    }
    phrases = draw(st.lists(st.sampled_from([*["one"] * 3, "step", "moved"]).flatmap(kinds.__getitem__), max_size=6))
    operations = tuple(operation for phrase in phrases for operation in phrase)
    specs = (engine, *(one.into for one in operations if isinstance(one, Move)))
    least = max(spec.num_stages for spec in specs)
    blocks = draw(st.lists(_blocks, min_size=max(1, least - 2), max_size=least + 1))
    if any(spec.engine.kind == "fsdp" for spec in specs):  # units that only some ranks gather
        blocks = [replace(block, kind="linear") if block.kind in BRANCHES else block for block in blocks]
    module = PipedModule(tuple(blocks), draw(seldom), draw(seldom), draw(seldom))
    kind = draw(st.sampled_from(["sgd", "adam", "averaged"]))
    return PipeScenario(module, engine, OptimizerSpec(kind), (Run(1), *operations))


class PlainStages(Plain):
    """One process, with the rows of all data ranks."""

    def __init__(self, module: PipedModule, optimizer: OptimizerSpec, num_ranks: int) -> None:
        self.pipe_module, self.num_steps = module, 0
        self.models = [module.build()]  # type: ignore[list-item]
        self.resize(num_ranks)
        self.params = dict(self.models[0].named_parameters())
        self.optimizer = optimizer.build(list(self.params.items()))

    def resize(self, num_ranks: int) -> None:
        models: list[Any] = self.models[:num_ranks]
        models += [self.pipe_module.build() for _ in range(num_ranks - len(models))]
        for model in models[1:]:
            for own, first in zip(model.modules(), models[0].modules(), strict=True):
                own._parameters = first._parameters
            model.load_state_dict(models[0].state_dict()) if model not in self.models else None
        self.models = models

    def run(self, operation: Run, num_micro_batches: int) -> float:
        total = 0.0
        for rank, model in enumerate(self.models):
            x, y = rows(operation.seed, rank, operation.rows_each * num_micro_batches)
            for some, wanted in zip(x.chunk(num_micro_batches), y.chunk(num_micro_batches), strict=True):
                loss = nn.functional.mse_loss(model(some), wanted) / (num_micro_batches * len(self.models))
                loss.backward()
                total += loss.item()
        return total


class Both:
    """The pipeline of this rank, and the one process; looks like a ``World`` where pieces are compared."""

    def __init__(self, scenario: PipeScenario, directory: Path) -> None:
        self.scenario, self.directory, self.tolerance, self.gradients = scenario, directory, 1e-10, "means"
        self.plain = PlainStages(scenario.module, scenario.optimizer, scenario.engine.engine.num_data_ranks)
        self.begin(scenario.engine)

    def begin(self, spec: PipeSpec) -> None:
        """A fresh pipeline with an engine."""
        options = {"stages_per_rank": 2} if spec.plan == TWO_STAGES else {}
        schedule = make_schedule(PLANS.get(spec.plan, spec.plan), spec.pipe, spec.micro_batches, **options)
        transport = None if current().device.type == "cuda" else spec.engine.transport
        self.mesh = Mesh({"pipe": spec.pipe, **dict(spec.engine.axes)}, transport=transport)
        model = self.scenario.module.build()
        make_parallel(model, self.mesh)
        self.pipeline = Pipeline(model, schedule, self.mesh)
        self.engine = spec.engine.build(self.pipeline.module, self._optimizer_of, self.mesh)
        self.spec, self.ours = spec, SimpleNamespace(engine=self.engine)

    def _optimizer_of(self, tensors: Any) -> torch.optim.Optimizer:
        return self.scenario.optimizer.build(list(tensors.items()))

    def end(self) -> None:
        self.engine.close()
        self.mesh.close()

    def own(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """As of a ``World``."""
        return {name: own_part(self.engine, name, value) for name, value in values.items()}

    def run(self, operation: Run) -> Iterator[str]:
        x, y = rows(operation.seed, self.engine.data_rank, operation.rows_each * self.spec.micro_batches)
        loss = self.pipeline.run(
            self.engine, nn.functional.mse_loss, x, y, keeps_gathered=operation.keeps_gathered
        )  # fmt: skip
        mean = None if loss is None else self.engine.mean_over_ranks(loss, tag="loss").item()
        wanted = self.plain.run(operation, self.spec.micro_batches)
        if mean is not None and abs(mean - wanted) > self.tolerance * (1 + abs(wanted)):
            yield f"loss {mean} instead of {wanted}"

    def clip(self, operation: Clip) -> Iterator[str]:
        norm = self.engine.clip_grad_norm_(operation.max_norm, float(operation.norm_type))
        params = list(self.plain.params.values())
        wanted = nn.utils.clip_grad_norm_(params, operation.max_norm, float(operation.norm_type))
        yield from differences({"norm": norm}, {"norm": wanted}, self.tolerance)

    def step(self, operation: Step) -> Iterator[str]:
        self.engine.step()
        self.plain.step()
        if operation.forgets:
            self.engine.zero_grad()
            self.plain.zero_grad()
        yield from ()

    def restore(self, operation: Restore) -> Iterator[str]:
        kept, first = self.engine.full_state_dict(), self.plain.state(0)  # the first rank's buffers
        yield from self.run(Run(operation.seed))
        yield from self.step(Step())
        self.engine.load_full_state_dict(kept)
        for model in self.plain.models:
            model.load_state_dict(first)

    def move(self, operation: Move) -> Iterator[str]:
        self.directory.mkdir(exist_ok=True)
        folder = self.directory / str(self.plain.num_steps)
        self.engine.save(folder)
        before, mesh = self.engine, self.mesh
        self.begin(operation.into)
        before.close()
        mesh.close()
        self.engine.load(folder)
        self.plain.zero_grad()
        first = self.plain.states()[0]
        self.plain.resize(operation.into.engine.num_data_ranks)
        for model in self.plain.models:
            model.load_state_dict(first)
        yield from ()

    def looks(self) -> Iterator[str]:
        yield from pieces(self)  # type: ignore[arg-type]
        known = dict(self.plain.models[self.engine.data_rank].named_buffers(remove_duplicate=False))
        buffers = dict(self.engine.module.named_buffers(remove_duplicate=False))
        yield from differences(buffers, {name: known[name] for name in buffers if name in known}, self.tolerance)
        state, wanted = self.engine.full_state_dict(), self.plain.models[0].state_dict()
        params = [name for name, _ in self.engine.module.named_parameters(remove_duplicate=False)]
        found = {name: state[name] for name in params if name in state}
        yield from differences(found, {name: wanted[name] for name in found}, self.tolerance)


def on_rank(rank: int, scenario: PipeScenario, directory: str | None) -> list[tuple[str, str]]:
    """Do it up to the first operation that is not answered equal; of each its kind and what came of it."""
    meshes = Meshes(rank, scenario.num_ranks)
    done: list[tuple[str, str]] = []
    both: Both | None = None
    acts = {"Run": Both.run, "Clip": Both.clip, "Step": Both.step, "Restore": Both.restore, "Move": Both.move}
    for number, operation in enumerate((None, *scenario.operations)):
        current().emit(number)
        kind = "build" if operation is None else type(operation).__name__
        try:
            if both is None:
                both = Both(scenario, Path(directory or ""))
                found = []
            else:
                found = [*acts[kind](both, operation), *both.looks()]
            answer = f"different: after {operation}: {found[0]}" if found else "equal"
        except Different as error:
            answer = f"different: {error}"
        except Exception as error:
            text = first_line(error)
            is_documented = isinstance(error, ValueError) and any(words in text for words in REFUSED)
            answer = f"refused: {text}" if is_documented else f"crash: {type(error).__name__}: {text}"
        is_refused, is_over = meshes.largest([answer.startswith("refused"), answer != "equal"])
        # One rank's refusal ends the run of all, whose stages may have computed with what it refuses.
        done.append((kind, "refused" if is_refused else answer))
        if is_over:
            return done
    assert both is not None
    both.end()
    return done
