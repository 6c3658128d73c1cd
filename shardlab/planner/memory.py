"""Bytes at rest (after the optimizer's step, before gradients are forgotten), by role and rank, without running.

For P fp32 parameters with Adam over N ranks; sharded parts include the padding of each bucket or unit:

===============================  ==========  =========  ===============
strategy                         parameters  gradients  optimizer state
===============================  ==========  =========  ===============
single, ddp, bucketed            4P          4P         8P
zero1                            4P          4P         8P/N
zero2                            4P          4P/N       8P/N
zero3, fsdp                      4P/N        4P/N       8P/N
fsdp no_shard                    4P          4P         8P
fsdp hybrid_shard in groups of S  4P/S       4P/S       8P/S
===============================  ==========  =========  ===============

With a 16-bit ``compute_dtype`` zero1 and zero2 hold 2P parameters and 4P/N master weights. Gradients of zero1 are then
in ``reduce_dtype``; if that differs from the stored dtype, zero1 also holds their means, 4P/N. zero3 and fsdp hold what
the table says.
Optimizer state is kept for pieces of parameters, never for padding. Not counted: activations, temporaries, the
transports' scratch, gradients that accumulate inside ``no_sync()``.
Source: Rajbhandari et al., arXiv 1910.02054, section 5; Zhao et al., arXiv 2304.11277, section 3.2.

Of a tensor-parallel GPT the data axes are planned as ever, with ``divided(model, ...)`` in the place of the model:
``predicted_memory`` then speaks of the ranks of one data axis, which ``on_tensor_ranks`` spreads over the mesh.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import nan

import pandas as pd

from shardlab.partition.slices import even_slice
from shardlab.planner.groups import Group, groups_of
from shardlab.planner.rows import ROWS
from shardlab.planner.setup import ITEMSIZES, Optimizer, PlannedModel, PlannedParam, Setup
from shardlab.records.tables import MEMORY
from shardlab.vocabulary import Offload, Phase, Role

OFFLOADED = {
    Offload.NONE: (),
    Offload.PARAMETERS: (Role.PARAMETER,),
    Offload.ALL: (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE),
}


def predicted_memory(
    model: PlannedModel, setup: Setup, *, ranks: Sequence[int] | None = None, run: str | None = None
) -> pd.DataFrame:
    """Table ``memory`` with ``source='predicted'`` and ``where='rest'``: one row per role and rank.

    Args:
        model: its parameters.
        setup: the strategy.
        ranks: those wanted; None for all.
        run: name of the run; None for the strategy's.

    Raises:
        ValueError: a rank or a parameter's name that does not exist.
    """
    groups = groups_of(model, setup)
    held = {rank: bytes_at_rest(groups, setup, rank) for rank in setup.ranks_among(ranks)}
    for of_rank in held.values():
        of_rank[Role.OTHER] += model.buffer_bytes
    return memory_table(run or setup.strategy, held)


def memory_table(run: str, held: Mapping[int, Mapping[Role, int]]) -> pd.DataFrame:
    """Table ``memory`` of what ranks hold at rest, by role."""
    rows = [(rank, role, of_rank[role]) for rank, of_rank in held.items() for role in Role]
    of_allocator = ("allocated_bytes", "rounding_bytes", "fragmented_bytes", "reserved_bytes", "resident_bytes")
    table = pd.DataFrame(rows, columns=["rank", "role", "bytes"]).assign(
        run=run, source="predicted", step=0, time_us=nan, phase=Phase.STEP, where="rest",
        **dict.fromkeys(of_allocator),
    )  # fmt: skip
    return MEMORY.frame(table)


def sent_bytes(model: PlannedModel, setup: Setup) -> float:
    """Bytes of parameters and gradients that a rank sends in a step of one micro-batch, on average over the ranks.

    By the ring formula, padding included; the few numbers by which ranks agree are left out.
    """
    params = sum(group.layout.padded_numel * group.itemsize for group in groups_of(model, setup))
    kept = setup.precision
    of_gradient = 1.0 if kept is None else kept.gradient / kept.parameter
    return float(params * sum(setup.row.sent(setup.sizes, 1, of_gradient).values()))


def bytes_at_rest(groups: Sequence[Group], setup: Setup, rank: int) -> Counter[Role]:
    """Bytes that ``rank`` holds of ``groups``, the module's buffers left out."""
    held: Counter[Role] = Counter()
    for group in groups:
        held.update(_of_group(group, setup, setup.shard_of(rank)))
    for role in OFFLOADED[Offload(setup.offload)] if setup.row.by_unit else ():
        held[Role.OFFLOADED] += held.pop(role, 0)
    return held


def _of_group(group: Group, setup: Setup, shard: int) -> dict[Role, int]:
    row, precision = setup.row, setup.precision
    stepped_numel = sum(piece.numel for piece in group.stepped(shard))
    gradient_itemsize = group.itemsize if precision is None else precision.gradient
    has_gradient = group.trainable if row.packs else group.used
    held = {
        Role.PARAMETER: _numel(group, shard, chunks=row.parameters) * group.itemsize,
        Role.GRADIENT: has_gradient * _numel(group, shard, chunks=row.gradients) * gradient_itemsize,
        Role.MASTER_WEIGHT: 0 if precision is None else stepped_numel * precision.master,
        **_kept(group, setup, shard),
    }
    return held | _in_other_dtypes(group, setup, shard)


def _in_other_dtypes(group: Group, setup: Setup, shard: int) -> dict[Role, int]:
    """The roles that change where whole parameters, or their gradients, have another dtype than the stored one."""
    if setup.row.parameters or not setup.row.state:
        return {}
    held, numel, chunk = {}, group.layout.padded_numel, group.layout.chunk_sizes[shard] * group.itemsize
    if (computed := setup.dtype_in_compute(group.dtype)) != group.dtype:
        held = {Role.PARAMETER: numel * ITEMSIZES[computed], Role.MASTER_WEIGHT: chunk}
    if (reduced := setup.dtype_in_reduction(group.dtype)) != group.dtype and not setup.row.gradients:
        held[Role.GRADIENT] = group.trainable * (numel * ITEMSIZES[reduced] + chunk)
    return held


def _numel(group: Group, shard: int, *, chunks: bool) -> int:
    return group.layout.chunk_sizes[shard] if chunks and not group.is_whole else group.layout.padded_numel


def _kept(group: Group, setup: Setup, shard: int) -> dict[Role, int]:
    """What the optimizer keeps for the pieces of a rank."""
    numel_of = {piece.name: piece.numel for piece in group.layout.pieces(0 if group.is_whole else shard)}
    held = {Role.OPTIMIZER_STATE: 0, Role.OTHER: 0}
    for name, param in group.params.items():
        # Where nothing is divided each rank steps parameters without elements too.
        is_stepped = param.stepped and (name in numel_of or not ROWS[setup.strategy].state)
        kept = setup.kept_for(name) if is_stepped else setup.kept_for(name).from_start
        if kept is not None:
            values = numel_of.get(name, 0) * _state_itemsize(kept, group, setup)
            held[Role.OPTIMIZER_STATE] += values + kept.scalar_bytes
            held[Role.OTHER] += kept.counter_bytes
    return held


def _state_itemsize(kept: Optimizer, group: Group, setup: Setup) -> int:
    if setup.precision is None:
        return kept.values_per_element * group.itemsize
    return sum((setup.precision.momentum, setup.precision.variance)[: kept.values_per_element])


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
