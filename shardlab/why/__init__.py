"""Why a step takes as long as it does: a recorded step run again, as it was or with one thing changed. No torch."""

from shardlab.why.causes import causes
from shardlab.why.recorded_step import critical_path, recorded_step, what_if_free

__all__ = ["causes", "critical_path", "recorded_step", "what_if_free"]
