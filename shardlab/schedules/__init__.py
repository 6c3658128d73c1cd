"""Schedules of pipelines as data, and what they cost."""

from shardlab.schedules.actions import PLANS, Action, Kind, Schedule, make_schedule
from shardlab.schedules.clock import Played, play, programs

__all__ = ["PLANS", "Action", "Kind", "Played", "Schedule", "make_schedule", "play", "programs"]
