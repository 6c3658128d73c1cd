"""What a strategy will hold and send, without running it: the engines' own arithmetic, the engines' own tables.

Nothing here imports torch. ``model_states`` needs only the number of parameters; ``predicted_memory`` needs the
parameters (``described(module)``) and a ``Setup``, and is exact. ``predicted_collectives``, which needs the engines
too, is that of ``dry.planned_model``, imported when it is used. How long a step takes: ``shardlab.forecast``.
"""

from typing import TYPE_CHECKING

from shardlab.installed import imported_when_used
from shardlab.planner.formulas import PRECISIONS, ModelStates, Precision, model_states
from shardlab.planner.gpu import Gpu
from shardlab.planner.memory import divided, on_tensor_ranks, predicted_memory, sent_bytes
from shardlab.planner.setup import ADAM, SGD, SGD_MOMENTUM, Optimizer, PlannedModel, PlannedParam, Setup, described

if TYPE_CHECKING:
    from shardlab.dry.planned_model import predicted_collectives

__all__ = [
    "ADAM", "PRECISIONS", "SGD", "SGD_MOMENTUM", "Gpu", "ModelStates", "Optimizer", "PlannedModel", "PlannedParam",
    "Precision", "Setup", "described", "divided", "model_states", "on_tensor_ranks", "predicted_collectives",
    "predicted_memory", "sent_bytes",
]  # fmt: skip

__getattr__ = imported_when_used(__name__, __file__)
