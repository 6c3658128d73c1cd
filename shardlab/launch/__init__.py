"""Ranks: start them, call functions on them, print their output, report which one failed, and leave none behind."""

from shardlab.launch.placement import Placement, RankContext, current, place
from shardlab.launch.pool import RankPool, launch
from shardlab.launch.rank_errors import RankDied, RankError, RankHang

__all__ = [
    "Placement", "RankContext", "RankDied", "RankError", "RankHang", "RankPool", "current", "launch", "place",
]  # fmt: skip
