"""Who holds which piece: rows of table ``shards``, from what an engine says that it holds; the same by module."""

from collections import Counter
from typing import Any

import pandas as pd

from shardlab.analysis.held_bytes import module_bytes
from shardlab.engines import AnyEngine
from shardlab.partition.slices import stretches
from shardlab.records.tables import SHARDS
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role

_KEYS = {"run": "now", "source": "measured", "rank": 0}


def shard_rows(engine: AnyEngine) -> list[dict[str, Any]]:
    """Every piece of a parameter, gradient or optimizer state that this rank holds, bucket by bucket.

    Of a slice of tensor parallelism the elements are counted in the whole parameter. A slice of a matrix's columns has
    one range for each row of the matrix; each becomes a row.

    Returns:
        Rows of table ``shards``, without run, rank and step.
    """
    bytes_of: Counter[tuple[str, Role, tuple[int, int]]] = Counter()
    for holding in engine.holdings():
        if holding.name and (holding.role is not Role.OPTIMIZER_STATE or holding.tensor.nbytes):
            bytes_of[holding.name, holding.role, holding.span] += holding.tensor.nbytes
    buckets = {name: number for number, one in enumerate(engine.divisions()) for name in one.layout.names}
    order = {name: place for place, name in enumerate(buckets or engine.params)}
    rows: list[dict[str, Any]] = []
    for (name, role, span), num_bytes in sorted(bytes_of.items(), key=lambda held: order[held[0][0]]):
        slice_, numel = engine.slices.get(name), span[1] - span[0]
        shape = engine.params[name].shape if slice_ is None else slice_.full_shape
        rows += [
            {
                "parameter": name, "shape": "x".join(map(str, shape)), "role": role, "bucket": buckets.get(name, -1),
                "start": start, "stop": stop,
                "bytes": num_bytes if stop - start == numel else num_bytes // numel * (stop - start),
            }
            for start, stop in ([span] if slice_ is None else stretches(slice_, *span))
        ]  # fmt: skip
    return rows


def modules_table(engine: AnyEngine, depth: int | None = None) -> pd.DataFrame:
    """Bytes that this rank holds now of each module: gradients between backward and ``zero_grad()`` only.

    Args:
        engine: any strategy.
        depth: how many parts of a module's name count; None for the modules that have the parameters.

    Returns:
        One row per module, and one for what belongs to no one module: ``module``, ``parameter_bytes``,
        ``gradient_bytes``, ``optimizer_bytes``, ``offloaded_bytes`` (of these three, what is in host memory),
        ``other_bytes`` and ``bytes``. They add up to the bytes of ``engine.live_tensors()``.

    Raises:
        ValueError: ``depth`` is below 1.
    """
    shards = SHARDS.frame([{**_KEYS, "step": 0, **row} for row in shard_rows(engine)])
    held = bytes_by_role(engine.live_tensors())
    whole = pd.DataFrame([{**_KEYS, "role": str(role), "bytes": num_bytes} for role, num_bytes in held.items()])
    return module_bytes(shards, whole, depth).drop(columns=list(_KEYS))
