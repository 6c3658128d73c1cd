"""Pipeline parallelism: schedules as data, what they cost, and the ranks that do them."""

from shardlab.pipeline.clock import Played, play
from shardlab.pipeline.schedules import PLANS, Action, Kind, Schedule, make_schedule

__all__ = ["PLANS", "Action", "Kind", "Played", "Schedule", "make_schedule", "play"]
