"""shardlab: sharded training, hand-written and measured. What does each strategy cost in memory, communication, time?

The names below are all that most notebooks and scripts need. They are imported when first used, so that plots and
tables work without torch.
"""

from typing import TYPE_CHECKING

from shardlab.installed import __version__ as __version__
from shardlab.installed import imported_when_used

if TYPE_CHECKING:
    from shardlab.comm import Communicator
    from shardlab.comm.mesh import Mesh
    from shardlab.data_sets import load_text
    from shardlab.engines import DDP, FSDP, Bucketed, Engine, Single, ZeRO1, ZeRO2, ZeRO3, build_engine
    from shardlab.experiment import CompareConfig, TrainStep, Workload, compare, load_comparison, plan, write_report
    from shardlab.experiment.told.answer import answer
    from shardlab.experiment.told.verdicts import verdicts
    from shardlab.experiment.trained.tensor import show_tp_plan
    from shardlab.launch import RankPool
    from shardlab.models import build_model
    from shardlab.optimizers import GradScaler, ShardedOptimizer
    from shardlab.partition import Link
    from shardlab.plots.show import show
    from shardlab.recording.record import record
    from shardlab.records.store import load_run
    from shardlab.testing import check_agreement, check_strategy
    from shardlab.units.table import show_units

__all__ = [
    "DDP", "FSDP", "Bucketed", "Communicator", "CompareConfig", "Engine", "GradScaler", "Link", "Mesh", "RankPool",
    "ShardedOptimizer", "Single", "TrainStep", "Workload", "ZeRO1", "ZeRO2", "ZeRO3", "answer", "build_engine",
    "build_model", "check_agreement", "check_strategy", "compare", "load_comparison", "load_run",
    "load_text", "plan", "record", "show", "show_tp_plan", "show_units", "verdicts", "write_report",
]  # fmt: skip

__getattr__ = imported_when_used(__name__, __file__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
