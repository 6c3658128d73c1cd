"""What torch's CUDA allocator holds of the device, item by item: nothing is left over."""

import pandas as pd

from shardlab.analysis.memory import REST, RUN
from shardlab.tables import MEMORY
from shardlab.vocabulary import Role

LIBRARIES, ROUNDING, FRAGMENTED, CACHED = "library workspaces", "rounding", "fragmentation", "cached"


def allocator_items(memory: pd.DataFrame) -> pd.DataFrame:
    """What the allocator held after the last recorded step, on the rank whose allocator held most.

    Args:
        memory: table ``memory``; the rows with ``where == "rest"`` that tell of an allocator are used: none on CPU.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``item``, ``bytes``; of each run they add up to ``reserved_bytes``. An
        item is a role that tensors have; 'library workspaces' (in no tensor of the engine: workspaces of cuBLAS and its
        like, and tensors of the program around it); 'rounding' (to whole blocks); 'fragmentation' (free parts of
        segments in use); 'cached' (free segments, kept to be used again).

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = memory[(memory["where"] == REST) & memory["reserved_bytes"].notna()]
    rows = rows[rows["step"] == rows.groupby(RUN)["step"].transform("max")]
    items = []
    for (run, source), own in rows.groupby(RUN, sort=False):
        most = own["reserved_bytes"].max()
        fullest = own[own["rank"] == own.loc[own["reserved_bytes"] == most, "rank"].min()]
        place = {"run": run, "source": source, "rank": fullest["rank"].iloc[0], "step": fullest["step"].iloc[0]}
        items += [place | {"item": item, "bytes": num_bytes} for item, num_bytes in _items(fullest).items()]
    return pd.DataFrame(items, columns=[*RUN, "rank", "step", "item", "bytes"])


def _items(rows: pd.DataFrame) -> dict[str, int]:
    """Of the rows of one moment on one rank."""
    held = {str(role): int(num_bytes) for role, num_bytes in zip(rows["role"], rows["bytes"], strict=True)}
    held.pop(Role.OFFLOADED, None)  # in host memory
    workspace = held.pop(Role.WORKSPACE)
    allocated, rounding, fragmented, reserved = (
        int(rows[f"{name}_bytes"].iloc[0]) for name in ("allocated", "rounding", "fragmented", "reserved")
    )
    beside = {
        LIBRARIES: workspace - rounding,
        ROUNDING: rounding,
        FRAGMENTED: fragmented,
        CACHED: reserved - allocated - fragmented,
    }
    return {role: num_bytes for role, num_bytes in held.items() if num_bytes} | beside
