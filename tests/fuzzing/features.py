"""What is left out of the scenarios for now, and why; deleting a line of ``OFF`` switches it on.

Scenarios are made of anything; ``sift`` takes out what belongs to a feature that is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fuzzing.between import Evaluate, Freeze, Habit
from tests.fuzzing.checkpoints import Load
from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.modules import BRANCH_KINDS, BlockSpec
from tests.fuzzing.operation import Operation
from tests.fuzzing.optimizers import OWN, WHOLE
from tests.fuzzing.states import FullParams, NamedIn, NamedOut, OptimizerIn, OptimizerOut, StateIn, StateOut
from tests.fuzzing.training import Backward, FailsAlone, Forward, Step, ZeroGrad

if TYPE_CHECKING:
    from tests.fuzzing.run import Scenario

OFF: dict[str, str] = {
    "units differ": "4: units that only some ranks gather are refused when two gathers meet, else when time is up",
}
"""Features that are off, with the reason."""


def sift(scenario: Scenario, features: frozenset[str]) -> Scenario:
    for name, take_out in SIEVES.items():
        if name not in features:
            scenario = take_out(scenario)
    return scenario


def _without(scenario: Scenario, unwanted: Callable[[Operation], bool]) -> Scenario:
    return replace(scenario, operations=tuple(one for one in scenario.operations if not unwanted(one)))


def _without_kinds(*kinds: type[Operation]) -> Callable[[Scenario], Scenario]:
    return lambda scenario: _without(scenario, lambda one: isinstance(one, kinds))


def _with(kind: type[Operation], **fields: object) -> Callable[[Scenario], Scenario]:
    """All operations of a kind with other values of these fields."""

    def take_out(scenario: Scenario) -> Scenario:
        some = (replace(one, **fields) if isinstance(one, kind) else one for one in scenario.operations)
        return replace(scenario, operations=tuple(some))

    return take_out


def _with_blocks(scenario: Scenario, change: Callable[[BlockSpec], BlockSpec]) -> Scenario:
    blocks = tuple(change(block) for block in scenario.module.blocks)
    return replace(scenario, module=replace(scenario.module, blocks=blocks))


def _linear(scenario: Scenario, *kinds: str) -> Scenario:
    """The scenario with simple blocks in the places of these."""
    return _with_blocks(scenario, lambda b: replace(b, kind="linear") if b.kind in kinds else b)


def _uses_fsdp(scenario: Scenario) -> bool:
    return any(engine.kind == "fsdp" for engine in scenario.engines)


def _forward_before_step(scenario: Scenario) -> Scenario:
    """Between a backward and the next step, losses that wait and zero_grad() aside, no forward of a whole model."""
    if not _uses_fsdp(scenario):
        return scenario
    kept: list[Operation] = []
    reduced = False  # gradients are there that have not been stepped
    for operation in scenario.operations:
        looks = isinstance(operation, Evaluate | Forward) or (
            isinstance(operation, FullParams) and operation.inside in ("evaluate", "train")
        )
        if looks and reduced:
            continue
        # A forward that never comes to its backward leaves as much.
        if isinstance(operation, Evaluate) or (isinstance(operation, Forward) and operation.depth is not None):
            continue
        if isinstance(operation, Backward | FullParams):
            reduced = True
        elif isinstance(operation, Step | ZeroGrad):
            reduced = False
        if isinstance(operation, Step) and any(isinstance(one, Forward) for one in kept[_last_backward(kept) :]):
            continue
        kept.append(operation)
    return replace(scenario, operations=tuple(kept))


def _last_backward(operations: list[Operation]) -> int:
    places = [place for place, one in enumerate(operations) if isinstance(one, Backward)]
    return places[-1] if places else 0


def _frozen_anew(scenario: Scenario) -> Scenario:
    if not _uses_fsdp(scenario):
        return scenario
    return _linear(_with(Forward, depth=None)(_without_kinds(Freeze)(scenario)), "sometimes")


def _units_differ(scenario: Scenario) -> Scenario:
    """Where units are replicated each rank may use others."""
    options = [dict(engine.options) for engine in scenario.engines]
    if not any(some.get("wrap") in (5, "every") and some.get("sharding") != "no_shard" for some in options):
        return scenario
    return _linear(scenario, *BRANCH_KINDS)


def _own_buffers(scenario: Scenario) -> Scenario:
    if all(block.kind not in ("running", "batchnorm") for block in scenario.module.blocks):
        return scenario
    return _without_kinds(StateOut, StateIn)(scenario)


def _reentrant(scenario: Scenario) -> Scenario:
    return _with_blocks(scenario, lambda block: replace(block, checkpoint=block.checkpoint.split()[0]))


def _left_out(scenario: Scenario) -> Scenario:
    kinds = (NamedIn, NamedOut, OptimizerIn, OptimizerOut)
    return _without_kinds(*kinds)(scenario) if scenario.optimizer.left_out else scenario


def with_engines(scenario: Scenario, change: Callable[[EngineSpec], EngineSpec]) -> Scenario:
    """The scenario with its first engine, and those it moves to, changed."""
    operations = tuple(
        replace(one, into=change(one.into)) if isinstance(one, Load) and one.into is not None else one
        for one in scenario.operations
    )
    return replace(scenario, engine=change(scenario.engine), operations=operations)


def _other_ranks(scenario: Scenario) -> Scenario:
    first = scenario.engine

    def is_other(operation: Operation) -> bool:
        into = operation.into if isinstance(operation, Load) else None
        return into is not None and (into.num_ranks, into.place) != (first.num_ranks, first.place)

    return _without(scenario, is_other)


def _part_of_the_ranks(scenario: Scenario) -> Scenario:
    if scenario.engine.num_ranks < scenario.num_ranks:
        return replace(scenario, engine=EngineSpec(axes=(("data", scenario.num_ranks),)))
    return _without(
        scenario, lambda one: isinstance(one, Load) and (one.into or scenario.engine).num_ranks < scenario.num_ranks
    )


def _tensor_axis(scenario: Scenario) -> Scenario:
    def change(engine: EngineSpec) -> EngineSpec:
        if engine.num_tensor_ranks == 1:
            return engine
        return EngineSpec(axes=(("data", engine.num_ranks),), place=engine.place)

    return with_engines(scenario, change)


def _with_optimizer(scenario: Scenario, unwanted: Iterable[str], kind: str) -> Scenario:
    kind = kind if scenario.optimizer.kind in unwanted else scenario.optimizer.kind
    return replace(scenario, optimizer=replace(scenario.optimizer, kind=kind))


def _precision(scenario: Scenario) -> Scenario:
    def change(engine: EngineSpec) -> EngineSpec:
        return replace(engine, options=tuple(pair for pair in engine.options if pair[0] != "precision"))

    return with_engines(scenario, change)


def _guards(scenario: Scenario) -> Scenario:
    scenario = _with_optimizer(scenario, WHOLE, "averaged")
    if any(engine.rounds for engine in scenario.engines):
        scenario = _without(scenario, lambda one: isinstance(one, FullParams) and one.inside in ("evaluate", "train"))
    return with_engines(scenario, lambda engine: replace(engine, guards=False))


SIEVES: dict[str, Callable[[Scenario], Scenario]] = {
    "forward before step": _forward_before_step,  # FSDP: a forward without backward between backward and step()
    "frozen anew": _frozen_anew,  # FSDP: freeze and thaw, and units that a micro-batch leaves out
    "overwritten": lambda scenario: _linear(scenario, "overwrite"),  # in place, what autograd has saved
    "step before backward": _with(Step, drops=True),  # a loss of before the step
    "units differ": _units_differ,  # FSDP, not no_shard: units that a rank may leave out
    "torch's habits": _without_kinds(Habit),  # on the optimizer or module instead of the engine
    "rank's own buffers": _own_buffers,  # in full_state_dict(), where they differ between ranks
    "reentrant": _reentrant,  # FSDP: reentrant checkpointing
    "plain backward": _with(Backward, how="engine"),  # loss.backward()
    "left out": _left_out,  # an optimizer that leaves a parameter out, whose state is loaded
    "other ranks": _other_ranks,  # a checkpoint that is loaded into another number of ranks
    "part of the ranks": _part_of_the_ranks,  # meshes that leave ranks out, or several at once
    "tensor axis": _tensor_axis,  # a tensor-parallel module under an engine
    "error on one rank": _without_kinds(FailsAlone),  # raised by the user's code
    "retained graph": _with(Backward, retain=False),  # backward(retain_graph=True)
    "own optimizers": lambda scenario: _with_optimizer(scenario, OWN, "sgd"),  # of a user's class
    "precision": _precision,  # fewer bits in compute or in reductions
    "guards": _guards,  # and what they refuse; without them only right programs
}
ALL = frozenset(SIEVES)
ON = ALL.difference(OFF)
RIGHT = ON - {"guards", "torch's habits"}
