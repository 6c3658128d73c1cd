"""Sequences over ranks: attention among tokens of which each rank has a part."""

from shardlab.context.attention import WAYS, attention
from shardlab.context.parallel import ContextParallel
from shardlab.context.parts import Sent, messages_of, positions_of, share_of_work

__all__ = ["WAYS", "ContextParallel", "Sent", "attention", "messages_of", "positions_of", "share_of_work"]
