"""Bytes at rest by module: what each part of the model costs in parameters, gradients and optimizer state."""

import pandas as pd

from shardlab.analysis.memory import REST
from shardlab.tables import SHARDS
from shardlab.vocabulary import Role

RANK = ["run", "source", "rank"]
COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "offloaded_bytes", "other_bytes")
COLUMN_OF = {
    str(Role.PARAMETER): "parameter_bytes",
    str(Role.GRADIENT): "gradient_bytes",
    str(Role.OPTIMIZER_STATE): "optimizer_bytes",
    str(Role.MASTER_WEIGHT): "optimizer_bytes",
    str(Role.OFFLOADED): "offloaded_bytes",
}
ROOT = "(root)"
NO_MODULE = "(of no one module)"


def module_bytes(shards: pd.DataFrame, held: pd.DataFrame, depth: int | None = None) -> pd.DataFrame:
    """What each rank holds of each module, at rest: after a step, while gradients are held.

    Args:
        shards: table ``shards``.
        held: bytes of every role on these ranks, all together: columns ``run``, ``source``, ``rank``, ``role`` and
            ``bytes``, such as ``held_at_rest`` gives.
        depth: how many parts of a module's name count, for example 2 for ``blocks.3``; None for the modules that have
            the parameters.

    Returns:
        One row per run, rank and module, in the order of the parameters, and one for what belongs to no one module:
        buffers, step counters, flat buffers and their padding, and what no engine names. ``parameter_bytes``,
        ``gradient_bytes``, ``optimizer_bytes`` (with master weights), ``offloaded_bytes`` (of these three, what is in
        host memory and so not in their columns), ``other_bytes`` and ``bytes``, all of them; so the bytes of a rank add
        up to what it holds.

    Raises:
        ValueError: a column is missing, or ``depth`` is below 1.
    """
    SHARDS.check(shards)
    if depth is not None and depth < 1:
        raise ValueError(f"depth: {depth} is below 1")
    last = shards[shards["step"] == shards.groupby(RANK)["step"].transform("max")]
    named = _by_column(last.assign(module=[_module_of(str(name), depth) for name in last["parameter"]]))
    whole = _by_column(held.assign(module=NO_MODULE))
    named = _with_offloaded(named, whole.droplevel("module"))
    rest = whole - named.groupby(RANK).sum().reindex(whole.droplevel("module").index).to_numpy()
    table = pd.concat([named, rest.fillna(whole)])
    return table.assign(bytes=table.sum(axis=1)).astype("int64").reset_index()


def _with_offloaded(named: pd.DataFrame, whole: pd.DataFrame) -> pd.DataFrame:
    """Move the pieces that a rank does not hold in their own role to the offloaded bytes.

    Table ``shards`` says what a piece is, and ``memory`` where it is: there an offloaded one has no other role.
    """
    pieces = named.groupby(RANK).sum()
    is_offloaded = (pieces > whole.reindex(pieces.index)).reindex(named.droplevel("module").index).to_numpy()
    moved = named.where(is_offloaded, 0).sum(axis=1)
    return named.mask(is_offloaded, 0).assign(offloaded_bytes=moved)


def held_at_rest(memory: pd.DataFrame) -> pd.DataFrame:
    """The bytes of every role on each rank after the last step in which they were sampled.

    Args:
        memory: table ``memory``.
    """
    rows = memory[memory["where"] == REST]
    last = rows["step"] == rows.groupby(RANK)["step"].transform("max")
    return rows.loc[last, [*RANK, "role", "bytes"]]


def _by_column(rows: pd.DataFrame) -> pd.DataFrame:
    columns = rows["role"].astype(str).map(lambda role: COLUMN_OF.get(role, "other_bytes"))
    sums = rows.assign(column=columns).groupby([*RANK, "module", "column"], sort=False)["bytes"].sum()
    table = sums.unstack(fill_value=0).reindex(columns=list(COLUMNS), fill_value=0)
    return table.rename_axis(columns=None).astype("int64")


def _module_of(parameter: str, depth: int | None) -> str:
    return ".".join(parameter.split(".")[:-1][:depth]) or ROOT
