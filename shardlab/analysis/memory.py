"""Memory of a run in one line per role: at rest after a step, and at the peak of a step."""

import pandas as pd

from shardlab.tables import MEMORY

RUN = ["run", "source"]


def at_rest(memory: pd.DataFrame) -> pd.DataFrame:
    """Live bytes of each role after the last step, on the rank that holds most of that role.

    Args:
        memory: table ``memory``; the rows with ``where == "rest"`` are used.

    Returns:
        ``run``, ``source``, ``step``, ``role``, ``bytes``: one row per run and role.

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = memory[memory["where"] == "rest"]
    rows = rows[rows["step"] == rows.groupby(RUN)["step"].transform("max")]
    return rows.groupby([*RUN, "step", "role"], sort=False)["bytes"].max().reset_index()


def peak(memory: pd.DataFrame) -> pd.DataFrame:
    """Live bytes of each role at the run's highest peak.

    That is one moment on one rank: the roles add up to the peak. (The maximum of each role over ranks and steps would
    add moments that never were one.)

    Args:
        memory: table ``memory``; the rows with ``where == "peak"`` are used.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``role``, ``bytes``: one row per run and role.

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = memory[memory["where"] == "peak"]
    moments = rows.groupby([*RUN, "rank", "step"], sort=False)["bytes"].sum().reset_index()
    highest = moments.loc[moments.groupby(RUN, sort=False)["bytes"].idxmax(), [*RUN, "rank", "step"]]
    chosen = rows.merge(highest, on=[*RUN, "rank", "step"])
    return chosen.groupby([*RUN, "rank", "step", "role"], sort=False)["bytes"].max().reset_index()
