"""From a configuration to ranks to records: ``compare`` and the training step it uses."""

from shardlab.experiment.compare import Comparison, claim, compare, is_reporter, load_comparison
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.report import write_report
from shardlab.experiment.saved import load_saved
from shardlab.experiment.step import StepResult, TrainStep

__all__ = [
    "CompareConfig",
    "Comparison",
    "StepResult",
    "TrainStep",
    "claim",
    "compare",
    "is_reporter",
    "load_comparison",
    "load_saved",
    "write_report",
]
