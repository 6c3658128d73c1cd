"""Tensor and sequence parallelism: a plain model whose layers are divided over the tensor axis of the mesh.

Read in this order: linear, embedding, cross_entropy, sequence, rng, styles, plan, gpt.
"""

from shardlab.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from shardlab.tensor_parallel.embedding import VocabParallelEmbedding
from shardlab.tensor_parallel.gpt import gpt_plan
from shardlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shardlab.tensor_parallel.plan import Plan, parallelize_module
from shardlab.tensor_parallel.rng import differing_by_rank
from shardlab.tensor_parallel.state import load_state_dict, merge_state_dict
from shardlab.tensor_parallel.styles import Column, OnSequence, OwnDropout, Row, Scatter, Style, Vocabulary

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "OnSequence",
    "OwnDropout",
    "Plan",
    "Row",
    "RowParallelLinear",
    "Scatter",
    "Style",
    "VocabParallelEmbedding",
    "Vocabulary",
    "differing_by_rank",
    "gpt_plan",
    "load_state_dict",
    "merge_state_dict",
    "parallelize_module",
    "vocab_parallel_cross_entropy",
]
