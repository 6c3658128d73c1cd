"""What a strategy will hold and send, without running it: the engines' own arithmetic, the engines' own tables.

Nothing here imports torch. ``model_states`` needs only the number of parameters; ``predicted_memory`` and
``predicted_collectives`` need the parameters (``described(module)``) and a ``Setup``, and are exact.
"""

from shardlab.planner.collectives import predicted_collectives
from shardlab.planner.fit import Gpu, gathered_at_once
from shardlab.planner.formulas import PRECISIONS, Layer, ModelStates, Precision, activation_bytes, model_states
from shardlab.planner.memory import predicted_memory
from shardlab.planner.setup import ADAM, SGD, SGD_MOMENTUM, Optimizer, PlannedModel, PlannedParam, Setup, described
from shardlab.planner.tensor import TensorSetup, divided, on_tensor_ranks, predicted_tensor_collectives

__all__ = [
    "ADAM", "PRECISIONS", "SGD", "SGD_MOMENTUM", "Gpu", "Layer", "ModelStates", "Optimizer",
    "PlannedModel", "PlannedParam", "Precision", "Setup", "TensorSetup", "activation_bytes", "described", "divided",
    "gathered_at_once", "model_states", "on_tensor_ranks", "predicted_collectives", "predicted_memory",
    "predicted_tensor_collectives",
]  # fmt: skip
