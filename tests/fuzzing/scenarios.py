"""Random scenarios: Hypothesis draws them, and makes the ones that fail as small as they can be.

The simplest choice stands first everywhere, since Hypothesis shrinks towards it. Operations come mostly in the order in
which users write them (``_training_step``, ``_moved``), with others in between.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzzing.around_step import HOOKS, HookedStep, StepThatLooks, StepThatRaises, WritePieces
from tests.fuzzing.between import AddGroup, ChangeMeans, Evaluate, Freeze, Habit, LearningRate, Mode
from tests.fuzzing.checkpoints import Load, Save
from tests.fuzzing.drawn import Menu, drawn_optimizer, engines, fitting, modules, seldom, with_whole_parameters
from tests.fuzzing.engines import PEERS
from tests.fuzzing.features import sift, with_engines
from tests.fuzzing.operation import Operation
from tests.fuzzing.optimizers import WHOLE
from tests.fuzzing.run import Scenario

from tests.fuzzing.states import (  # isort: skip
    FullParams, GradientsOut, NamedIn, NamedOut, OptimizerIn, OptimizerOut, StateIn, StateOut,
)  # fmt: skip
from tests.fuzzing.training import Backward, Clip, FailsAlone, Finish, Forward, ScaledStep, Step, ZeroGrad


def scenarios(menu: Menu) -> st.SearchStrategy[Scenario]:
    return _scenarios(menu).map(lambda scenario: sift(scenario, menu.features))


@st.composite
def _scenarios(draw: st.DrawFn, menu: Menu) -> Scenario:
    engine = draw(engines(menu))
    kinds = {"one": _single(menu), "step": _training_step(), "moved": _moved(menu), "back": _back()}
    names = ["one"] * 4 + ["step"] * 2 + ([] if engine.name in PEERS else ["moved", "back"])
    phrase = st.sampled_from(names).flatmap(kinds.__getitem__)
    phrases = draw(st.lists(phrase, min_size=draw(st.sampled_from([0, 2, 4])), max_size=menu.most))
    operations = tuple(operation for phrase in phrases for operation in phrase)
    if engine.name in PEERS:
        operations = tuple(_for_peers(operation) for operation in operations if operation.peers)
    scenario = Scenario(draw(modules()), engine, operations=operations, deep=draw(st.booleans()), pool=menu.num_ranks)
    return _fitting(draw, scenario)


def _for_peers(operation: Operation) -> Operation:
    return replace(operation, called=False) if isinstance(operation, Forward) else operation


def _fitting(draw: st.DrawFn, scenario: Scenario) -> Scenario:
    scenario = replace(
        scenario, optimizer=drawn_optimizer(draw, scenario.engines), module=fitting(scenario.module, scenario.engines)
    )
    if scenario.optimizer.kind not in WHOLE or draw(seldom):
        return scenario
    return with_engines(scenario, with_whole_parameters)


_seeds = st.integers(0, 9)
_depths = st.sampled_from([None, None, None, 1, 0, 2])
_which = st.sampled_from(["all", "all", "last", "first"])
_how = st.sampled_from(["engine", "engine", "plain"])
_insides = st.sampled_from(["look", "change", "replace", "borrow", "evaluate", "train"])
_clips = st.sampled_from(["clip module", "clip step tensors"])
_parts = st.sampled_from(["enter", "blocks", "leave", "blocks.0", "blocks.1", "spare"])


_steps = st.one_of(
    st.builds(HookedStep, st.sampled_from(HOOKS)),
    st.builds(StepThatRaises, st.sampled_from([True, True, False])),
    st.builds(StepThatLooks, _seeds),
)


@st.composite
def _training_step(draw: st.DrawFn) -> list[Operation]:
    """What stands in every training loop; parts of it may be missing."""
    operations: list[Operation] = [
        part
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2])))
        for part in (Forward(draw(_seeds), draw(_depths), quiet=True), Backward(quiet=True))
    ]
    if operations and draw(seldom):
        operations.append(Freeze(draw(_parts)))  # what has a gradient that is still to be reduced
    if operations and draw(seldom) and draw(st.booleans()):
        operations.append(Habit(draw(_clips)))  # too early
    operations.append(Forward(draw(_seeds), draw(_depths)))
    if draw(seldom):
        operations.append(Forward(draw(_seeds), draw(_depths)))
    if draw(seldom):
        operations.append(Evaluate(draw(_seeds), inference=draw(seldom)))
    if draw(seldom) and draw(seldom):
        operations.append(Backward(draw(_how), retain=True))
    # Rarely inside no_sync() too, so that clip or step must reduce.
    operations.append(Backward(draw(_how), quiet=draw(seldom) and draw(seldom)))
    if draw(seldom):
        # Before the step, whose parameters they do not have: evaluations, and a forward of a loss that comes later.
        forward = Forward(draw(_seeds), draw(_depths))
        operations.append(
            draw(st.sampled_from([Evaluate(draw(_seeds), draw(_depths), inference=draw(seldom)), forward]))
        )
    if draw(st.booleans()):
        operations.append(Clip(draw(st.sampled_from([0.1, 1.0])), draw(st.sampled_from([2.0, 1.0, "inf"]))))
    if draw(seldom) and draw(seldom):
        operations.append(Habit(draw(_clips)))
    if draw(seldom) and draw(seldom):
        operations.append(ChangeMeans(draw(_parts), draw(st.booleans())))
    operations.append(draw(_steps) if draw(seldom) else Step())
    if draw(seldom):
        operations.append(LearningRate())
    if draw(st.sampled_from([True, True, True, False])):
        operations.append(ZeroGrad(draw(seldom) and draw(seldom)))
    return operations


@st.composite
def _moved(draw: st.DrawFn, menu: Menu) -> list[Operation]:
    """A checkpoint, perhaps some training, and on with another engine, mostly on other ranks."""
    between = draw(_training_step()) if draw(st.booleans()) else []
    return [Save(), *between, Load(draw(engines(menu)))]


@st.composite
def _back(draw: st.DrawFn) -> list[Operation]:
    """What the state is, a step, and back to it; or full parameters that are changed for good."""
    pairs = [(StateOut, StateIn), (OptimizerOut, OptimizerIn), (NamedOut, NamedIn), (None, None)]
    out, into = draw(st.sampled_from(pairs))
    if out is None:
        return [*draw(_training_step()), FullParams(True, draw(st.sampled_from(["change", "replace"])), draw(_seeds))]
    return [out(), *draw(_training_step()), into()]


def _single(menu: Menu) -> st.SearchStrategy[list[Operation]]:
    into = st.one_of(st.none(), engines(menu))
    faults = st.sampled_from(["none", "none", "none", "forward", "backward"])
    kinds: list[st.SearchStrategy[Any]] = [
        st.builds(Forward, _seeds, _depths, st.booleans(), faults, seldom),
        st.builds(Evaluate, _seeds, _depths, st.booleans(), st.booleans()),
        st.builds(Backward, _how, _which, st.booleans(), seldom),
        st.builds(Clip, st.sampled_from([1.0, 0.1]), st.sampled_from([2.0, 1.0, "inf"])),
        st.builds(Step, st.sampled_from([True, True, False])),
        st.builds(ZeroGrad, seldom),
        st.builds(Finish),
        st.builds(Freeze, _parts, st.booleans()),
        st.builds(ChangeMeans, _parts, st.booleans()),
        st.builds(WritePieces, _parts),
        _steps,
        st.builds(LearningRate, st.sampled_from([None, 0.02])),
        st.builds(Mode, st.booleans()),
        st.builds(ScaledStep, _seeds, seldom),
        st.builds(FailsAlone, _seeds, st.integers(0, 3), st.sampled_from(["backward", "forward"]), _how, seldom),
        st.builds(AddGroup),
        st.builds(FullParams, st.booleans(), _insides, _seeds),
        st.builds(StateOut),
        st.builds(StateIn),
        st.builds(OptimizerOut),
        st.builds(OptimizerIn),
        st.builds(NamedOut),
        st.builds(NamedIn),
        st.builds(GradientsOut),
        st.builds(Save),
        st.builds(Load, into),
        st.builds(Habit, st.sampled_from(
            ["optimizer.zero_grad", "module.zero_grad", "optimizer.step", "clip module", "clip step tensors"]
        )),
    ]  # fmt: skip
    return st.one_of(kinds).map(lambda operation: [operation])
