"""What the script of a find imports: everything a scenario is said in, and ``replay``."""

import sys

from shardlab.launch import RankPool
from tests.fuzzing.engines import EngineSpec  # noqa: F401
from tests.fuzzing.modules import BlockSpec, ModuleSpec  # noqa: F401
from tests.fuzzing.optimizers import OptimizerSpec  # noqa: F401
from tests.fuzzing.run import Scenario, run_scenario
from tests.fuzzing.scenarios import *  # noqa: F403


def replay(scenario: Scenario) -> None:
    """Do it on fresh ranks and say what came of it; ends the process with status 1 where it is a find."""
    with RankPool(scenario.num_ranks, device="cpu", timeout_s=10.0, threads_per_rank=1) as pool:
        verdict = run_scenario(pool, scenario)
    for number, (kind, answer) in enumerate(verdict.steps):
        sys.stdout.write(f"{number}: {kind}: {answer}\n")
    sys.stdout.write(f"{verdict.kind}{'' if verdict.at is None else f' at operation {verdict.at}'}: {verdict.text}\n")
    sys.exit(verdict.is_find)
