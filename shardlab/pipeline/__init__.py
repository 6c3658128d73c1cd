"""Pipeline parallelism: a model cut into stages, and ranks that do a schedule."""

from shardlab.pipeline.messages import Like, loans_of, messages_of
from shardlab.pipeline.pipeline import Pipeline
from shardlab.pipeline.stages import cut, parts_of

__all__ = ["Like", "Pipeline", "cut", "loans_of", "messages_of", "parts_of"]
