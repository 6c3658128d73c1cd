"""What a strategy will hold and send, without running it: the engines' own arithmetic, the engines' own tables.

Nothing here imports torch. ``model_states`` needs only the number of parameters; ``predicted_memory`` and
``predicted_collectives`` need the parameters (``described(module)``) and a ``Setup``, and are exact. ``predict_step``
forecasts seconds, of a transformer by its sizes; it is not exact, and ``validate_published`` says by how much.
"""

from shardlab.planner.collectives import predicted_collectives
from shardlab.planner.fit import Gpu, gathered_at_once
from shardlab.planner.forecast import Forecast, predict_step
from shardlab.planner.formulas import PRECISIONS, Layer, ModelStates, Precision, activation_bytes, model_states
from shardlab.planner.memory import predicted_memory
from shardlab.planner.setup import ADAM, SGD, SGD_MOMENTUM, Optimizer, PlannedModel, PlannedParam, Setup, described
from shardlab.planner.tensor import TensorSetup, divided, on_tensor_ranks, predicted_tensor_collectives
from shardlab.planner.validation import validate_published

__all__ = [
    "ADAM", "PRECISIONS", "SGD", "SGD_MOMENTUM", "Forecast", "Gpu", "Layer", "ModelStates", "Optimizer",
    "PlannedModel", "PlannedParam", "Precision", "Setup", "TensorSetup", "activation_bytes", "described", "divided",
    "gathered_at_once", "model_states", "on_tensor_ranks", "predict_step", "predicted_collectives", "predicted_memory",
    "predicted_tensor_collectives", "validate_published",
]  # fmt: skip
