"""Tensor and sequence parallelism: a plain model whose layers are divided over the tensor axis of the mesh.

Read in this order: linear, shared_input, vocab_parallel, sequence, sources, rng, styles, places, plan. A plan for any
module is suggested: flow, regions, plan_trial, suggest.
"""

from shardlab.comm.autograd_collectives import copy, reduce
from shardlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shardlab.tensor_parallel.plan import Plan, gpt_plan, load_state_dict, merge_state_dict, parallelize_module
from shardlab.tensor_parallel.rng import differing_by_rank
from shardlab.tensor_parallel.styles import Column, OnSequence, OwnDropout, Row, Scatter, Style, Vocabulary
from shardlab.tensor_parallel.suggest import Suggestion, check_tp_plan, suggest_tp_plan
from shardlab.tensor_parallel.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "Column", "ColumnParallelLinear", "OnSequence", "OwnDropout", "Plan", "Row", "RowParallelLinear", "Scatter",
    "Style", "Suggestion", "VocabParallelEmbedding", "Vocabulary", "check_tp_plan", "copy", "differing_by_rank",
    "gpt_plan", "load_state_dict", "merge_state_dict", "parallelize_module", "reduce", "suggest_tp_plan",
    "vocab_parallel_cross_entropy",
]  # fmt: skip
