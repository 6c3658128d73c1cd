"""From a configuration to ranks to records: ``compare`` and the training step it uses.

The names below are imported when they are first used: the command line needs the options alone for its help, and torch
takes 1.5 s to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.experiment.comparison import Comparison, compare, is_reporter, prepare
    from shardlab.experiment.config import CompareConfig
    from shardlab.experiment.directory import claim, new_directory
    from shardlab.experiment.plan_table import plan
    from shardlab.experiment.report import write_report
    from shardlab.experiment.saved import load_comparison, load_saved
    from shardlab.experiment.step import StepResult, TrainStep
    from shardlab.experiment.summary import readable_summary
    from shardlab.experiment.tensor_plan import show_tp_plan
    from shardlab.experiment.workload import Workload

_FILES = {
    "comparison": ("Comparison", "compare", "is_reporter", "prepare"),
    "config": ("CompareConfig",),
    "directory": ("claim", "new_directory"),
    "plan_table": ("plan",),
    "report": ("write_report",),
    "saved": ("load_comparison", "load_saved"),
    "step": ("StepResult", "TrainStep"),
    "summary": ("readable_summary",),
    "tensor_plan": ("show_tp_plan",),
    "workload": ("Workload",),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}

__all__ = [
    "CompareConfig",
    "Comparison",
    "StepResult",
    "TrainStep",
    "Workload",
    "claim",
    "compare",
    "is_reporter",
    "load_comparison",
    "load_saved",
    "new_directory",
    "plan",
    "prepare",
    "readable_summary",
    "show_tp_plan",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its file when it is first used."""
    if name not in _FILE_OF:
        raise AttributeError(f"module 'shardlab.experiment' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"shardlab.experiment.{_FILE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
