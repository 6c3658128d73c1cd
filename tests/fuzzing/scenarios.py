"""Random scenarios: Hypothesis draws them, and makes the ones that fail as small as they can be.

The simplest choice stands first everywhere, since Hypothesis shrinks towards it. Operations come mostly in the order in
which users write them (``_training_step``), with others in between.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzzing.engines import OURS, PEERS, EngineSpec, OptimizerSpec
from tests.fuzzing.features import ALL, sift
from tests.fuzzing.modules import (
    ALIKE_KINDS,
    BRANCH_KINDS,
    CHECKPOINTS,
    OUTPUT_KINDS,
    BlockSpec,
    ModuleSpec,
)
from tests.fuzzing.operations import (
    Backward,
    Clip,
    Evaluate,
    Finish,
    Forward,
    Freeze,
    LearningRate,
    Mode,
    Operation,
    ScaledStep,
    Step,
    ZeroGrad,
)
from tests.fuzzing.run import Scenario
from tests.fuzzing.states import (
    AddGroup,
    FullParams,
    Habit,
    Hold,
    Load,
    OptimizerIn,
    OptimizerOut,
    Save,
    StateIn,
    StateOut,
)


@dataclass(frozen=True)
class Menu:
    """What may be drawn.

    Attributes:
        num_ranks: of the pool.
        strategies: names of engines.
        features: see ``features``.
        most: operations and training steps together.
    """

    num_ranks: int = 2
    strategies: tuple[str, ...] = OURS
    features: frozenset[str] = ALL
    most: int = 12


def scenarios(menu: Menu) -> st.SearchStrategy[Scenario]:
    """Scenarios of a menu."""
    return _scenarios(menu).map(lambda scenario: sift(scenario, menu.features))


@st.composite
def _scenarios(draw: st.DrawFn, menu: Menu) -> Scenario:
    engine = draw(engines(menu))
    phrase = st.sampled_from([True, True, False]).flatmap(lambda one: _single(menu) if one else _training_step())
    phrases = draw(st.lists(phrase, min_size=draw(st.sampled_from([0, 2, 4])), max_size=menu.most))
    operations = tuple(operation for phrase in phrases for operation in phrase)
    if engine.name in PEERS:
        operations = tuple(operation for operation in operations if operation.peers)
    return Scenario(draw(modules()), engine, draw(optimizers), operations, draw(st.booleans()))


@st.composite
def modules(draw: st.DrawFn) -> ModuleSpec:
    """Modules of up to four blocks."""
    blocks = draw(st.lists(_blocks, max_size=4))
    calls = st.lists(st.integers(0, len(blocks) - 1), max_size=len(blocks) + 1) if blocks else st.just([])
    in_order = draw(st.sampled_from([True, True, False]))
    path = list(range(len(blocks))) if in_order else draw(calls)
    return ModuleSpec(
        width=draw(st.sampled_from([4, 3, 5])),
        blocks=tuple(blocks),
        path=tuple(path),
        enter=draw(st.sampled_from(["linear", "linear", "embedding"])),
        tied=draw(st.sampled_from(["none", "none", "none", "blocks", "ends"])),
        shared=draw(_seldom),
        spare=draw(_seldom),
        frozen_enter=draw(_seldom),
        output=draw(st.sampled_from(OUTPUT_KINDS)),
    )


_seldom = st.sampled_from([False, False, False, False, True])
_blocks = st.builds(
    BlockSpec,
    kind=st.sampled_from(["linear", "linear", *ALIKE_KINDS, *BRANCH_KINDS]),
    checkpoint=st.sampled_from(["none", "none", "none", "none", *CHECKPOINTS]),
    frozen=_seldom,
)
optimizers = st.builds(
    OptimizerSpec, kind=st.sampled_from(["sgd", "sgd", "adam", "adamw"]), groups=st.booleans(), left_out=_seldom
)


def engines(menu: Menu) -> st.SearchStrategy[EngineSpec]:
    """Engines over all ranks of the pool."""
    names = [name for name in menu.strategies if (name == "single") <= (menu.num_ranks == 1)]
    # FSDP has more options than all others together.
    weighted = names + [name for name in names if name == "fsdp"] * 2
    return st.sampled_from(weighted).flatmap(lambda name: _engine(name, menu.num_ranks))


@st.composite
def _engine(draw: st.DrawFn, name: str, num_ranks: int) -> EngineSpec:
    options: dict[str, Any] = {}
    axes: tuple[tuple[str, int], ...] = (("data", num_ranks),)
    if name in ("bucketed", "zero1", "zero2", "zero3"):
        options["bucket_bytes"] = draw(st.sampled_from([200, 400, 1, 25 * 1024**2]))
    if name in ("zero1", "zero2", "zero3"):
        options["partition"] = draw(st.sampled_from(["elements", "elements", "round_robin", "contiguous", "balanced"]))
    if name == "fsdp":
        axes = _fsdp_options(draw, options, num_ranks)
    if name == "torch_ddp" or name == "torch_zero1":
        options = {"bucket_bytes": 400, "find_unused_parameters": True}
    if name == "torch_fsdp2":
        options = {"wrap": draw(st.sampled_from(["block", "root"]))}
    transport = "gloo" if name in PEERS else draw(st.sampled_from(["shared_memory"] * 7 + ["gloo"]))
    return EngineSpec(name, tuple(options.items()), axes, transport)


def _fsdp_options(draw: st.DrawFn, options: dict[str, Any], num_ranks: int) -> tuple[tuple[str, int], ...]:
    """Draw FSDP's options; the axes that belong to them."""
    kinds = ["full_shard", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"]
    options["sharding"] = sharding = draw(st.sampled_from(kinds))
    options["wrap"] = draw(st.sampled_from(["block", "block", "root", 20, "every"]))
    options["prefetch"] = draw(st.sampled_from([1, 0, 2]))
    options["layout"] = draw(st.sampled_from(["flat", "dim0"]))
    if draw(_seldom) and sharding != "no_shard":
        options["replicate_below"] = 8
    if draw(_seldom):
        options["offload"] = draw(st.sampled_from(["parameters", "all"]))
    if sharding != "hybrid_shard":
        return (("data", num_ranks),)
    replicas = draw(st.sampled_from([size for size in (2, 1, 4) if num_ranks % size == 0]))
    return (("replica", replicas), ("shard", num_ranks // replicas))


_seeds = st.integers(0, 9)
_depths = st.sampled_from([None, None, None, 1, 0, 2])
_which = st.sampled_from(["all", "all", "last", "first"])
_how = st.sampled_from(["engine", "engine", "plain"])


@st.composite
def _training_step(draw: st.DrawFn) -> list[Operation]:
    """What stands in every training loop; parts of it may be missing."""
    operations: list[Operation] = [
        part
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2])))
        for part in (Forward(draw(_seeds), draw(_depths), quiet=True), Backward(quiet=True))
    ]
    operations.append(Forward(draw(_seeds), draw(_depths)))
    if draw(_seldom):
        operations.append(Forward(draw(_seeds), draw(_depths)))
    if draw(_seldom):
        operations.append(Evaluate(draw(_seeds)))
    operations.append(Backward(draw(_how)))
    if draw(_seldom):
        operations.append(Evaluate(draw(_seeds), draw(_depths)))
    if draw(st.booleans()):
        operations.append(Clip(draw(st.sampled_from([0.1, 1.0])), draw(st.sampled_from([2.0, 1.0, "inf"]))))
    operations.append(Step())
    if draw(_seldom):
        operations.append(LearningRate())
    if draw(st.sampled_from([True, True, True, False])):
        operations.append(ZeroGrad())
    return operations


def _single(menu: Menu) -> st.SearchStrategy[list[Operation]]:
    """Any one operation."""
    parts = st.sampled_from(["enter", "blocks", "leave", "blocks.0", "blocks.1", "spare"])
    others = st.sampled_from([name for name in menu.strategies if (name == "single") <= (menu.num_ranks == 1)])
    into = st.one_of(st.none(), others.flatmap(lambda name: _engine(name, menu.num_ranks)))
    faults = st.sampled_from(["none", "none", "none", "forward", "backward"])
    kinds: list[st.SearchStrategy[Any]] = [
        st.builds(Forward, _seeds, _depths, st.booleans(), faults),
        st.builds(Evaluate, _seeds, _depths, st.booleans()),
        st.builds(Backward, _how, _which, st.booleans()),
        st.builds(Clip, st.sampled_from([1.0, 0.1]), st.sampled_from([2.0, 1.0, "inf"])),
        st.builds(Step, st.sampled_from([True, True, False])),
        st.builds(ZeroGrad),
        st.builds(Finish),
        st.builds(Freeze, parts, st.booleans()),
        st.builds(LearningRate, st.sampled_from([None, 0.02])),
        st.builds(Mode, st.booleans()),
        st.builds(ScaledStep, _seeds, _seldom),
        st.builds(AddGroup),
        st.builds(FullParams, st.booleans(), st.sampled_from(["look", "change", "evaluate", "train"]), _seeds),
        st.builds(StateOut),
        st.builds(StateIn),
        st.builds(OptimizerOut),
        st.builds(OptimizerIn),
        st.builds(Save),
        st.builds(Load, into),
        st.builds(Hold, st.integers(0, 4), st.booleans()),
        st.builds(Habit, st.sampled_from(
            ["optimizer.zero_grad", "module.zero_grad", "optimizer.step", "clip module", "clip step tensors"]
        )),
    ]  # fmt: skip
    return st.one_of(kinds).map(lambda operation: [operation])
