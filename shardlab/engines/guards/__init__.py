"""What users may not do, and what they are told; an engine trains every right program without it."""

from shardlab.engines.guards.guards import Guards

__all__ = ["Guards"]
