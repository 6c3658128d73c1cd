"""What the script of a find imports: everything a scenario is said in, and ``replay``."""

import sys

from shardlab.launch import RankPool
from tests.fuzzing.around_step import HookedStep, StepThatLooks, StepThatRaises, WritePieces
from tests.fuzzing.between import AddGroup, ChangeMeans, Evaluate, Freeze, Habit, Hold, LearningRate, Mode
from tests.fuzzing.checkpoints import Load, Save
from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.modules import BlockSpec, ModuleSpec
from tests.fuzzing.optimizers import OptimizerSpec
from tests.fuzzing.run import Scenario, run_scenario
from tests.fuzzing.states import (
    FullParams,
    GradientsOut,
    NamedIn,
    NamedOut,
    OptimizerIn,
    OptimizerOut,
    StateIn,
    StateOut,
)
from tests.fuzzing.training import Backward, Clip, FailsAlone, Finish, Forward, ScaledStep, Step, ZeroGrad

__all__ = [
    "AddGroup", "Backward", "BlockSpec", "ChangeMeans", "Clip", "EngineSpec", "Evaluate", "FailsAlone", "Finish",
    "Forward", "Freeze", "FullParams", "GradientsOut", "Habit", "Hold", "HookedStep", "LearningRate", "Load", "Mode",
    "ModuleSpec", "NamedIn", "NamedOut", "OptimizerIn", "OptimizerOut", "OptimizerSpec", "Save", "ScaledStep",
    "Scenario", "StateIn", "StateOut", "Step", "StepThatLooks", "StepThatRaises", "WritePieces", "ZeroGrad", "replay",
]  # fmt: skip


def replay(scenario: Scenario) -> None:
    """Do it on fresh ranks and say what came of it; ends the process with status 1 where it is a find."""
    with RankPool(scenario.num_ranks, device="cpu", timeout_s=10.0, threads_per_rank=1) as pool:
        verdict = run_scenario(pool, scenario)
    for number, (kind, answer) in enumerate(verdict.steps):
        sys.stdout.write(f"{number}: {kind}: {answer}\n")
    sys.stdout.write(f"{verdict.kind}{'' if verdict.at is None else f' at operation {verdict.at}'}: {verdict.text}\n")
    sys.exit(verdict.is_find)
