"""What this rank holds of each module, of any engine at any time: ``modules_table(engine)``."""

import pandas as pd

from shardlab.analysis.modules import module_bytes
from shardlab.engines import Engine
from shardlab.experiment.run import shard_rows
from shardlab.tables import SHARDS
from shardlab.trace.memory_by_role import bytes_by_role

_KEYS = {"run": "now", "source": "measured", "rank": 0}


def modules_table(engine: Engine, depth: int | None = None) -> pd.DataFrame:
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
