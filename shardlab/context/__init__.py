"""Sequences over ranks: attention among tokens of which each rank has a part."""

from shardlab.context.attention import attention
from shardlab.context.parallel import ContextParallel
from shardlab.context.parts import WAYS, Sent, messages_of, positions_of, require_fit, share_of_work

__all__ = [
    "WAYS", "ContextParallel", "Sent", "attention", "messages_of", "positions_of", "require_fit", "share_of_work",
]  # fmt: skip
