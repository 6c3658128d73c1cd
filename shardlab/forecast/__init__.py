"""How long a step of a transformer takes on GPUs that are not here, and what it holds at its peak; costs of a machine.

``predict_step`` needs the sizes; it is not exact, and ``validate_published`` says by how much. Nothing imports torch.
"""

from shardlab.forecast.peak import Layer, activation_bytes
from shardlab.forecast.predict import Forecast, predict_step
from shardlab.forecast.published import validate_published

__all__ = ["Forecast", "Layer", "activation_bytes", "predict_step", "validate_published"]
