"""From a configuration to ranks to records: ``compare`` and the training step it uses.

The names below are imported when they are first used: the command line needs the options alone for its help, and torch
takes 1.5 s to import.
"""

from typing import TYPE_CHECKING

from shardlab.installed import imported_when_used

if TYPE_CHECKING:
    from shardlab.experiment.comparison import compare, is_reporter, prepare, run_prepared
    from shardlab.experiment.config import CompareConfig
    from shardlab.experiment.directory import claim, new_directory
    from shardlab.experiment.planned.plan import plan
    from shardlab.experiment.planned.what_if import what_if
    from shardlab.experiment.run.shard_rows import modules_table
    from shardlab.experiment.run.train_step import StepResult, TrainStep
    from shardlab.experiment.told.report import write_report
    from shardlab.experiment.told.saved_runs import Comparison, load_comparison, load_saved
    from shardlab.experiment.told.step_reasons import reasons, reasons_table, why
    from shardlab.experiment.told.summary import readable_summary
    from shardlab.experiment.trained.tensor import show_tp_plan
    from shardlab.experiment.trained.workload import Workload

__all__ = [
    "CompareConfig", "Comparison", "StepResult", "TrainStep", "Workload", "claim", "compare", "is_reporter",
    "load_comparison", "load_saved", "modules_table", "new_directory", "plan", "prepare", "readable_summary", "reasons",
    "reasons_table", "run_prepared", "show_tp_plan", "what_if", "why", "write_report",
]  # fmt: skip

__getattr__ = imported_when_used(__name__, __file__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
