"""shardlab: sharded training, hand-written and measured. What does each strategy cost in memory, communication, time?

The names below are all that most notebooks and scripts need. They are imported when first used, so that plots and
tables work without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardlab.installed import __version__ as __version__

if TYPE_CHECKING:
    from shardlab.comm import Communicator
    from shardlab.comm.mesh import Mesh
    from shardlab.data_sets import load_text
    from shardlab.engines import DDP, FSDP, Bucketed, Engine, Single, ZeRO1, ZeRO2, ZeRO3, build_engine
    from shardlab.experiment import CompareConfig, TrainStep, Workload, compare, load_comparison, plan, write_report
    from shardlab.experiment.answer import answer
    from shardlab.experiment.run_verdicts import verdicts
    from shardlab.experiment.tensor import show_tp_plan
    from shardlab.launch import RankPool, launch
    from shardlab.models import build_model
    from shardlab.optimizers import GradScaler, ShardedOptimizer
    from shardlab.partition import Link
    from shardlab.plots.show import show
    from shardlab.recording.record import record
    from shardlab.testing import check_agreement, check_strategy
    from shardlab.trace.store import load_run
    from shardlab.units.table import show_units

_ROOMS = {
    "shardlab.comm.communicator": ("Communicator",),
    "shardlab.comm.mesh": ("Mesh",),
    "shardlab.data_sets": ("load_text",),
    "shardlab.engines": ("DDP", "FSDP", "Bucketed", "Engine", "Single", "ZeRO1", "ZeRO2", "ZeRO3", "build_engine"),
    "shardlab.experiment": (
        "CompareConfig", "TrainStep", "Workload", "compare", "load_comparison", "plan", "write_report",
    ),
    "shardlab.experiment.answer": ("answer",),
    "shardlab.experiment.run_verdicts": ("verdicts",),
    "shardlab.experiment.tensor": ("show_tp_plan",),
    "shardlab.launch": ("RankPool", "launch"),
    "shardlab.models": ("build_model",),
    "shardlab.optimizers": ("GradScaler", "ShardedOptimizer"),
    "shardlab.partition": ("Link",),
    "shardlab.plots.show": ("show",),
    "shardlab.recording.record": ("record",),
    "shardlab.testing": ("check_agreement", "check_strategy"),
    "shardlab.trace.store": ("load_run",),
    "shardlab.units.table": ("show_units",),
}  # fmt: skip
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "DDP", "FSDP", "Bucketed", "Communicator", "CompareConfig", "Engine", "GradScaler", "Link", "Mesh", "RankPool",
    "ShardedOptimizer", "Single", "TrainStep", "Workload", "ZeRO1", "ZeRO2", "ZeRO3", "answer", "build_engine",
    "build_model",
    "check_agreement", "check_strategy", "compare", "launch", "load_comparison", "load_run", "load_text", "plan",
    "record", "show", "show_tp_plan", "show_units", "verdicts", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name from its room when it is first used."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'shardlab' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
