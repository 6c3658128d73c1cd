"""Strategies as parts of one final engine."""

from shardlab.engines import checkpoint
from shardlab.engines.state import EngineState
from shardlab.strategies.bucketed import Bucketed
from shardlab.strategies.ddp import DDP
from shardlab.strategies.engine import Engine
from shardlab.strategies.fsdp import FSDP
from shardlab.strategies.single import Single
from shardlab.strategies.strategy import Given, LaidOut, Strategy
from shardlab.strategies.zero1 import ZeRO1
from shardlab.strategies.zero2 import ZeRO2
from shardlab.strategies.zero3 import ZeRO3

EngineState.checkpointer = checkpoint
__all__ = ["DDP", "FSDP", "Bucketed", "Engine", "Given", "LaidOut", "Single", "Strategy", "ZeRO1", "ZeRO2", "ZeRO3"]
