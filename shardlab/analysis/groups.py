"""Who takes part in a collective: the ranks of its group, from the axes of the mesh.

A row names its axis and the size of its group, not the members. They follow from the layout of the mesh, row by row
with the last axis fastest: on ``{"replica": 2, "shard": 2}`` the shard groups are 0,1 and 2,3 and the replica groups
0,2 and 1,3.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import pandas as pd

from shardlab.tables import COLLECTIVES
from shardlab.vocabulary import MeshAxis

RUN = ["run", "source"]
# The axis that talks most lies innermost, where ranks are neighbours.
OUTERMOST_FIRST = (MeshAxis.REPLICA, MeshAxis.DATA, MeshAxis.SHARD, MeshAxis.TENSOR)


def with_group(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """``collectives`` with a column ``group``: the ranks that take part, for example ``0,2``.

    Args:
        collectives: table ``collectives``.
        axes: size of each axis of the mesh, outermost first, as ``Mesh`` takes it (and the manifest's ``mesh`` says).
            None reads the sizes from the rows, in the order replica, data, shard, tensor; that needs the rows of all
            ranks and of all axes longer than 1.

    Raises:
        ValueError: a column is missing, or the axes do not make the number of ranks.
    """
    COLLECTIVES.check(collectives)
    if collectives["group_size"].isna().any():
        raise ValueError("collectives: group_size is missing in some rows, so who took part is not known")
    group = pd.Series(pd.NA, index=range(len(collectives)), dtype="string")
    # Tables that were put together repeat their labels: count the rows anew.
    for (run, _), rows in collectives.reset_index(drop=True).groupby(RUN, sort=False):
        mesh = _axes_in(rows, str(run)) if axes is None else dict(axes)
        members = _groups(mesh, _ranks(rows, mesh, str(run)))
        keys = zip(rows["axis"].astype(str), rows["rank"].astype(int), strict=True)
        group.loc[rows.index] = [_member(members, key, mesh, str(run)) for key in keys]
    return collectives.assign(group=group.array)


def _axes_in(rows: pd.DataFrame, run: str) -> dict[str, int]:
    """The axes that the rows speak of, in the usual order."""
    sizes = rows.groupby("axis")["group_size"].unique()
    unequal = [str(axis) for axis, found in sizes.items() if len(found) > 1]
    if unequal:
        raise ValueError(f"axes: run {run!r} has groups of several sizes on axis {', '.join(unequal)}; give axes")
    order = {str(axis): place for place, axis in enumerate(OUTERMOST_FIRST)}
    unknown = [str(axis) for axis in sizes.index if axis not in order]
    if unknown and len(sizes) > 1:
        raise ValueError(f"axes: where {', '.join(unknown)} lies among the axes of run {run!r} is not known; give axes")
    names = sorted((str(axis) for axis in sizes.index), key=lambda axis: order.get(axis, 0))
    return {name: int(sizes[name][0]) for name in names}


def _ranks(rows: pd.DataFrame, mesh: Mapping[str, int], run: str) -> list[int]:
    """The global ranks on the mesh, row by row."""
    found, size = sorted({int(rank) for rank in rows["rank"]}), prod(mesh.values())
    if len(found) != size:
        shape = " x ".join(f"{axis}={length}" for axis, length in mesh.items())
        raise ValueError(
            f"axes: {shape} is a mesh of {size} ranks, but the rows of run {run!r} are of ranks "
            f"{', '.join(map(str, found))}; give the rows of all ranks and the axes of the whole mesh"
        )
    return found


def _groups(mesh: Mapping[str, int], ranks: list[int]) -> dict[tuple[str, int], str]:
    """The label of each rank's group on each axis."""
    grid = np.array(ranks).reshape(tuple(mesh.values()))
    labels: dict[tuple[str, int], str] = {}
    for place, axis in enumerate(mesh):
        for line in np.moveaxis(grid, place, -1).reshape(-1, mesh[axis]).tolist():
            labels |= {(axis, rank): ",".join(map(str, line)) for rank in line}
    return labels


def _member(members: Mapping[tuple[str, int], str], key: tuple[str, int], mesh: Mapping[str, int], run: str) -> str:
    if key not in members:
        raise ValueError(f"axes: run {run!r} has collectives on axis {key[0]!r}, which is none of {', '.join(mesh)}")
    return members[key]
