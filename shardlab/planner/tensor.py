"""Tensor parallelism of a GPT without running: what a rank holds, and its tables on the whole mesh.

The data axes are planned as ever, with ``divided(model, ...)`` in the place of the model: ``predicted_memory`` then
speaks of the ranks of one data axis, which ``on_tensor_ranks`` spreads over the mesh.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import pandas as pd

from shardlab.partition.slices import even_slice
from shardlab.planner.setup import PlannedModel, PlannedParam

# The dim along which a parameter of the package's GPT is divided; all others are replicated.
GPT_DIMS: Mapping[str, int] = {
    "token_embedding.weight": 0, "blocks.*.attention.[qkv]_proj.*": 0, "blocks.*.attention.out_proj.weight": 1,
    "blocks.*.mlp.fc1.*": 0, "blocks.*.mlp.fc2.weight": 1, "head.weight": 0,
}  # fmt: skip


def divided(model: PlannedModel, num_ranks: int, dims: Mapping[str, int] = GPT_DIMS) -> PlannedModel:
    """What each of ``num_ranks`` tensor-parallel ranks holds of a model.

    Args:
        model: the whole one.
        num_ranks: of the tensor axis.
        dims: the dim that is divided by pattern of the parameter's name; others are replicated.

    Raises:
        ValueError: the ranks do not divide a dim.
    """
    params = tuple(_divided(param, num_ranks, dims) for param in model.params)
    return replace(model, params=params, tensor_ranks=num_ranks)


def on_tensor_ranks(table: pd.DataFrame, num_ranks: int) -> pd.DataFrame:
    """A table of the ranks of a data axis as one of the mesh, whose tensor axis of ``num_ranks`` varies fastest."""
    # Stable: the messages of a rank stay in the order of issue.
    return pd.concat([table.assign(rank=table["rank"] * num_ranks + place) for place in range(num_ranks)]).sort_values(
        "rank", kind="stable", ignore_index=True
    )


def _divided(param: PlannedParam, num_ranks: int, dims: Mapping[str, int]) -> PlannedParam:
    for pattern, dim in dims.items():
        if fnmatchcase(param.spec.name, pattern):
            shape = even_slice(param.spec.shape, dim, 0, num_ranks).shape
            return replace(param, spec=replace(param.spec, shape=shape), sliced=True)
    return param
