"""What a strategy will hold and send, without running it: the engines' own arithmetic, the engines' own tables.

Nothing here imports torch. ``model_states`` needs a number of parameters only; ``predicted_memory`` and
``predicted_collectives`` need the parameters (``described(module)``) and a ``Setup``, and are exact.
"""

from shardlab.planner.collectives import predicted_collectives
from shardlab.planner.memory import predicted_memory
from shardlab.planner.model import PlannedModel, PlannedParam, described
from shardlab.planner.model_states import ModelStates, model_states
from shardlab.planner.paper import PaperNumber, zero_paper_numbers
from shardlab.planner.precision import PRECISIONS, Precision
from shardlab.planner.setup import ADAM, SGD, SGD_MOMENTUM, Optimizer, Setup, Sharding

__all__ = [
    "ADAM",
    "PRECISIONS",
    "SGD",
    "SGD_MOMENTUM",
    "ModelStates",
    "Optimizer",
    "PaperNumber",
    "PlannedModel",
    "PlannedParam",
    "Precision",
    "Setup",
    "Sharding",
    "described",
    "model_states",
    "predicted_collectives",
    "predicted_memory",
    "zero_paper_numbers",
]
