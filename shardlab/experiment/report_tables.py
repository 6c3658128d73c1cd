"""Tables of a report that say why: where in the model memory peaked, and what the length of a step consists of."""

from typing import Any

import pandas as pd

from shardlab.analysis.causal_graph import NoHostWaitsError
from shardlab.analysis.critical_path import ALL, critical_path, what_if_free
from shardlab.analysis.memory import allocator_items, peak
from shardlab.analysis.overlap import COMPUTE_KINDS
from shardlab.trace.store import Records
from shardlab.vocabulary import Collective, Role

PEAK = (
    "Where the peak of the traced step was: the unit that computed, on the rank where it is highest; what was alive at "
    "that moment, by role."
)
ALLOCATOR = (
    "What torch's CUDA allocator holds after the last step, on the rank where it is most: the items add up to all that "
    "it has reserved. Library workspaces are in no tensor of the engine; fragments are free parts of segments in use."
)
PATH = (
    "What one step consists of, from when the first rank begins it until the last has ended it: the longest chain of "
    "causes over all ranks, and how much shorter it would be if communication took no time. The step is that of median "
    "length on the first rank."
)


def peak_table(records: Records) -> pd.DataFrame:
    """Rank, unit and phase of each run's peak, and the bytes of every role that some run held then; they add up."""
    rows = peak(records.memory)
    rows = rows[rows["role"] != str(Role.OFFLOADED)]
    wide = rows.pivot_table(
        index=["run", "rank", "unit", "phase"], columns="role", values="bytes", aggfunc="sum", sort=False
    )
    held = [str(role) for role in Role if role in wide.columns and wide[role].any()]
    table = wide[held].assign(all=wide.sum(axis=1)) / 1e6
    names = {role: f"{role.replace('_', ' ')} (MB)" for role in (*held, "all")} | {"run": "strategy"}
    return table.reset_index().rename(columns=names).rename_axis(columns=None)


def allocator_table(records: Records) -> pd.DataFrame:
    """A column for each item of ``allocator_items``; without rows where no run was on a GPU."""
    items = allocator_items(records.memory)
    wide = items.pivot_table(index=["run", "rank"], columns="item", values="bytes", aggfunc="sum", sort=False) / 1e6
    wide = wide.rename(columns=lambda item: f"{item.replace('_', ' ')} (MB)").reset_index()
    return wide.rename(columns={"run": "strategy"}).rename_axis(columns=None)


def path_table(records: Records, steps: dict[str, int]) -> pd.DataFrame:
    """The critical path of one step of each run, in parts; runs in which a stream waits are left out.

    Args:
        records: of a comparison.
        steps: which step of each run.
    """
    return pd.DataFrame([row for run, step in steps.items() if (row := _path_row(records, run, step)) is not None])


def _path_row(records: Records, run: str, step: int) -> dict[str, Any] | None:
    axes = records.manifests[run].get("mesh")
    moved, worked = records.collectives, records.spans
    try:
        path = critical_path(moved, worked, run=run, step=step, axes=axes)
        gains = what_if_free(moved, worked, run=run, step=step, axes=axes).set_index("tag")["gain_us"] / 1e3
    except NoHostWaitsError:
        return None
    lengths = path.groupby("kind")["duration_us"].sum() / 1e3
    compute = lengths[lengths.index.isin([str(kind) for kind in COMPUTE_KINDS])].sum()
    moving = lengths[lengths.index.isin([str(op) for op in Collective])].sum()
    single = gains.drop(ALL, errors="ignore")
    return {
        "strategy": run,
        "step": step,
        "length (ms)": lengths.sum(),
        "compute (ms)": compute,
        "communication (ms)": moving,
        "all else (ms)": lengths.sum() - compute - moving,
        "gain if free (ms)": gains.get(ALL, 0.0),
        "gains most alone": single.idxmax() if len(single) else None,
        "its gain (ms)": single.max() if len(single) else None,
    }
