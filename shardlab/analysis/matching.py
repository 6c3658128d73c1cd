"""Which rows of different ranks are one collective, and which ranks take part in it.

A row names its axis and the size of its group, but not the members. They follow from the layout of the mesh, row by row
with the last axis fastest: on ``{"replica": 2, "shard": 2}`` the shard groups are 0,1 and 2,3 and the replica groups
0,2 and 1,3. The n-th collective of a group in a step is the same collective on all its ranks.
"""

from collections.abc import Mapping
from itertools import combinations
from math import prod

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.analysis.rows import KEYS, bounds
from shardlab.records.tables import COLLECTIVES
from shardlab.vocabulary import Collective, MeshAxis

RUN = ["run", "source"]
# The axis that communicates most is the innermost, where ranks are neighbours.
OUTERMOST_FIRST = (MeshAxis.PIPE, MeshAxis.REPLICA, MeshAxis.DATA, MeshAxis.SHARD, MeshAxis.TENSOR)
# No rank can finish before the last has joined. (The root of a broadcast does not wait, and a record does not name it.)
MEETING = (
    Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.BARRIER,
)  # fmt: skip
SAME = [*RUN, "step", "axis", "group", "place"]
CLOCK_TOLERANCE_US = 1e3


def with_group(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """``collectives`` with a column ``group``: the ranks that take part, for example ``0,2``.

    Args:
        collectives: table ``collectives``.
        axes: size of each axis of the mesh, outermost first, as ``Mesh`` takes it (and the manifest's ``mesh`` says).
            None reads the sizes from the rows, in the order pipe, replica, data, shard, tensor; this needs the rows of
            all ranks and of all axes longer than 1.

    Raises:
        ValueError: a column is missing, or the axes do not multiply to the number of ranks.
    """
    COLLECTIVES.check(collectives)
    if collectives["group_size"].isna().any():
        raise ValueError("collectives: group_size is missing in some rows, so the ranks that took part are unknown")
    group = pd.Series(pd.NA, index=range(len(collectives)), dtype="string")
    # Concatenated tables repeat their index labels, so the rows get new ones.
    for (run, _), rows in collectives.reset_index(drop=True).groupby(RUN, sort=False):
        mesh = _axes_in(rows, str(run)) if axes is None else dict(axes)
        members = _groups(mesh, _ranks(rows, mesh, str(run)), _sizes_of_parts(rows, mesh))
        keys = zip(rows["axis"].astype(str), rows["rank"].astype(int), strict=True)
        group.loc[rows.index] = [_member(members, key, mesh, str(run)) for key in keys]
    return collectives.assign(group=group.array)


def _axes_in(rows: pd.DataFrame, run: str) -> dict[str, int]:
    """The axes that appear in the rows, in the usual order."""
    sizes = rows.groupby("axis")["group_size"].unique()
    unequal = [str(axis) for axis, found in sizes.items() if len(found) > 1]
    if unequal:
        raise ValueError(f"axes: run {run!r} has groups of several sizes on axis {', '.join(unequal)}; give axes")
    order = {str(axis): place for place, axis in enumerate(OUTERMOST_FIRST)}
    unknown = [str(axis) for axis in sizes.index if axis not in order]
    if unknown and len(sizes) > 1:
        raise ValueError(
            f"axes: the position of {', '.join(unknown)} among the axes of run {run!r} is unknown; give axes"
        )
    names = sorted((str(axis) for axis in sizes.index), key=lambda axis: order.get(axis, 0))
    return {name: int(sizes[name][0]) for name in names}


def _ranks(rows: pd.DataFrame, mesh: Mapping[str, int], run: str) -> list[int]:
    """The global ranks on the mesh, row by row."""
    found, size = sorted({int(rank) for rank in rows["rank"]}), prod(mesh.values())
    if len(found) != size:
        shape = " x ".join(f"{axis}={length}" for axis, length in mesh.items())
        raise ValueError(
            f"axes: {shape} is a mesh of {size} ranks, but run {run!r} has rows of ranks "
            f"{', '.join(map(str, found))}; give the rows of all ranks and the axes of the whole mesh"
        )
    return found


def _sizes_of_parts(rows: pd.DataFrame, mesh: Mapping[str, int]) -> dict[str, int]:
    """The size of the inner part of each axis that is cut: of ``data``, ``data.inner``."""
    inner = rows[rows["axis"].astype(str).isin([f"{axis}.inner" for axis in mesh])]
    sizes = inner.groupby("axis")["group_size"].max()
    return {str(axis).removesuffix(".inner"): int(size) for axis, size in sizes.items()}


def _groups(mesh: Mapping[str, int], ranks: list[int], parts: Mapping[str, int]) -> dict[tuple[str, int], str]:
    """The label of each rank's group on each axis, on both parts of one that is cut, and on each product of axes."""
    grid = np.array(ranks).reshape(tuple(mesh.values()))
    labels: dict[tuple[str, int], str] = {}

    def label(name: str, lines: NDArray[np.intp]) -> None:
        for line in lines.tolist():
            labels.update({(name, rank): ",".join(map(str, line)) for rank in line})

    for number in range(1, len(mesh) + 1):
        for axes in combinations(range(len(mesh)), number):
            size = prod(grid.shape[axis] for axis in axes)
            along = np.moveaxis(grid, axes, range(-number, 0)).reshape(-1, size)
            label("_".join(list(mesh)[axis] for axis in axes), along)
    for axis, inner in parts.items():
        lines = np.moveaxis(grid, list(mesh).index(axis), -1).reshape(-1, mesh[axis] // inner, inner)
        label(f"{axis}.inner", lines.reshape(-1, inner))
        label(f"{axis}.outer", lines.swapaxes(1, 2).reshape(-1, mesh[axis] // inner))
    return labels


def _member(members: Mapping[tuple[str, int], str], key: tuple[str, int], mesh: Mapping[str, int], run: str) -> str:
    if key not in members:
        raise ValueError(f"axes: run {run!r} has collectives on axis {key[0]!r}, which is not one of {', '.join(mesh)}")
    return members[key]


def matched_collectives(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """The collectives in which all ranks wait for the last, with their group, their place and the last rank.

    Steps that some rank has not recorded, because the run was killed, are left out.

    Args:
        collectives: table ``collectives``.
        axes: see ``with_group``.

    Returns:
        The rows of ``collectives`` that are all-reduces, reduce-scatters, all-gathers, all-to-alls or barriers, and
        ``group``, ``place`` (n-th of its axis in the step), ``last_us`` (when the last rank began it), ``last_rank``.

    Raises:
        ValueError: a column or time is missing, the ranks issued different collectives, or one rank had the result
            before another began, so their clocks do not agree.
    """
    rows = with_group(collectives, axes)
    bounds(rows, "start_us", "end_us", "collectives")
    rows = _whole_steps(rows[rows["op"].isin([str(op) for op in MEETING])])
    rows = rows.sort_values([*KEYS, "seq"], kind="stable", ignore_index=True)
    rows["place"] = rows.groupby([*KEYS, "axis"], sort=False).cumcount()
    _check_same(rows)
    # Barriers count too, though they move nothing: the last rank is the one that began latest.
    last = rows.loc[rows.groupby(SAME, sort=False)["start_us"].idxmax(), [*SAME, "rank", "start_us"]]
    rows = rows.merge(last.rename(columns={"rank": "last_rank", "start_us": "last_us"}), on=SAME)
    _check_clocks(rows)
    return rows


def _whole_steps(rows: pd.DataFrame) -> pd.DataFrame:
    all_ranks = rows.groupby(RUN)["rank"].transform("nunique")
    return rows[rows.groupby([*RUN, "step"])["rank"].transform("nunique") == all_ranks]


def _check_same(rows: pd.DataFrame) -> None:
    # In an all-to-all ranks may send different numbers of elements, such as the rows of a mixture of experts; of sparse
    # gradients, whose elements are those of the whole, different numbers of bytes.
    sizes = rows["numel"].fillna(rows["bytes"]).mask(rows["op"] == Collective.ALL_TO_ALL, 0)
    alike = rows.assign(sizes=sizes).groupby(SAME, sort=False)
    found = alike.agg({"op": "nunique", "sizes": "nunique", "dtype": "nunique", "rank": "size", "group_size": "first"})
    wrong = found[(found[["op", "sizes", "dtype"]] > 1).any(axis=1) | (found["rank"] != found["group_size"])]
    if len(wrong):
        key = dict(zip(SAME, wrong.index[0], strict=True))
        differing = rows[(rows[SAME] == pd.Series(key)).all(axis=1)]
        calls = (f"rank {row.rank} {row.op} of {row.bytes} bytes ({row.tag})" for row in differing.itertuples())
        raise ValueError(
            f"collectives: in step {key['step']} of run {key['run']} the ranks {key['group']} on axis {key['axis']} "
            f"did not issue the same collectives; number {key['place']} is: {'; '.join(calls)}"
        )


def _check_clocks(rows: pd.DataFrame) -> None:
    early = rows[rows["end_us"] < rows["last_us"] - CLOCK_TOLERANCE_US]
    if len(early):
        row = early.iloc[0]
        raise ValueError(
            f"collectives: in step {row['step']} of run {row['run']} rank {row['rank']} had the result of {row['op']} "
            f"{row['tag']!r} {row['last_us'] - row['end_us']:.0f} us before rank {row['last_rank']} began it; "
            "the clocks of these ranks do not agree (ranks of several hosts?)"
        )
