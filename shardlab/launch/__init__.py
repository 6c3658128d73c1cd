"""Ranks: start them, call functions on them, print their output, report which one failed, and leave none behind."""

from shardlab.launch.errors import RankDied, RankError, RankHang
from shardlab.launch.placement import Placement, RankContext, current, place
from shardlab.launch.pool import RankPool, launch

__all__ = [
    "Placement", "RankContext", "RankDied", "RankError", "RankHang", "RankPool", "current", "launch", "place",
]  # fmt: skip
