"""What a strategy will hold and send, without running it: the engines' own arithmetic, the engines' own tables.

Nothing here imports torch. ``model_states`` needs only the number of parameters; ``predicted_memory`` needs the
parameters (``described(module)``) and a ``Setup``, and is exact. ``predict_step`` forecasts seconds, of a transformer
by its sizes; it is not exact, and ``validate_published`` says by how much. ``predicted_collectives``, which needs the
engines too, is that of ``dry.planned_model``, imported when it is used.
"""

from typing import TYPE_CHECKING

from shardlab.installed import imported_when_used
from shardlab.planner.forecast import Forecast, predict_step
from shardlab.planner.formulas import PRECISIONS, ModelStates, Precision, model_states
from shardlab.planner.gpu import Gpu
from shardlab.planner.memory import predicted_memory, sent_bytes
from shardlab.planner.peak import Layer, activation_bytes
from shardlab.planner.published import validate_published
from shardlab.planner.setup import ADAM, SGD, SGD_MOMENTUM, Optimizer, PlannedModel, PlannedParam, Setup, described
from shardlab.planner.tensor import divided, on_tensor_ranks

if TYPE_CHECKING:
    from shardlab.dry.planned_model import predicted_collectives

__all__ = [
    "ADAM", "PRECISIONS", "SGD", "SGD_MOMENTUM", "Forecast", "Gpu", "Layer", "ModelStates", "Optimizer",
    "PlannedModel", "PlannedParam", "Precision", "Setup", "activation_bytes", "described", "divided", "model_states",
    "on_tensor_ranks", "predict_step", "predicted_collectives", "predicted_memory", "sent_bytes",
    "validate_published",
]  # fmt: skip

__getattr__ = imported_when_used(__name__, __file__)
