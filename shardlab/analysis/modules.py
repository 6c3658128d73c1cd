"""Bytes at rest by module: what each part of the model costs in parameters, gradients and optimizer state."""

import pandas as pd

from shardlab.analysis.memory import REST
from shardlab.tables import SHARDS
from shardlab.vocabulary import Role

RANK = ["run", "source", "rank"]
COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "other_bytes")
COLUMN_OF = {
    str(Role.PARAMETER): "parameter_bytes",
    str(Role.GRADIENT): "gradient_bytes",
    str(Role.OPTIMIZER_STATE): "optimizer_bytes",
    str(Role.MASTER_WEIGHT): "optimizer_bytes",
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
        ``gradient_bytes``, ``optimizer_bytes`` (with master weights), ``other_bytes`` and ``bytes``, all of them; so
        the bytes of a rank add up to what it holds.

    Raises:
        ValueError: a column is missing, or ``depth`` is below 1.
    """
    SHARDS.check(shards)
    if depth is not None and depth < 1:
        raise ValueError(f"depth: {depth} is below 1")
    last = shards[shards["step"] == shards.groupby(RANK)["step"].transform("max")]
    named = _by_column(last.assign(module=[_module_of(str(name), depth) for name in last["parameter"]]))
    whole = _by_column(held.assign(module=NO_MODULE))
    rest = whole - named.groupby(RANK).sum().reindex(whole.droplevel("module").index).to_numpy()
    table = pd.concat([named, rest.fillna(whole)])
    return table.assign(bytes=table.sum(axis=1)).astype("int64").reset_index()


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
    return sums.unstack(fill_value=0).reindex(columns=list(COLUMNS), fill_value=0).rename_axis(columns=None)


def _module_of(parameter: str, depth: int | None) -> str:
    return ".".join(parameter.split(".")[:-1][:depth]) or ROOT
