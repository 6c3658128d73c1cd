"""Pipeline parallelism: a model cut into stages, and ranks that do a schedule."""

from shardlab.pipeline.pipeline import Pipeline
from shardlab.pipeline.stages import cut, parts_of

__all__ = ["Pipeline", "cut", "parts_of"]
