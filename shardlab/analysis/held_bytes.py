"""Bytes that ranks hold: at rest, at the peak of a step, through a step, in torch's allocator, in all; by module."""

import pandas as pd

from shardlab.analysis.rows import one_run
from shardlab.records.tables import MEMORY, SHARDS
from shardlab.vocabulary import Role

RUN = ["run", "source"]
RANK = [*RUN, "rank"]
MOMENT = [*RANK, "step", "time_us"]
REST, PEAK, PROCESS = "rest", "peak", "process"
WHOLE_STEP = (REST, PEAK, PROCESS)  # ``where`` of samples that stand for a step; in all others it names a unit
LIBRARIES, ROUNDING, FRAGMENTED, CACHED = "library workspaces", "rounding", "fragmentation", "cached"
COLUMN_OF: dict[str, str] = {
    Role.PARAMETER: "parameter_bytes", Role.GRADIENT: "gradient_bytes", Role.OPTIMIZER_STATE: "optimizer_bytes",
    Role.MASTER_WEIGHT: "optimizer_bytes", Role.OFFLOADED: "offloaded_bytes",
}  # fmt: skip
ALIKE = 0.01  # relative: steps that send so little more are said to be alike
ROOT, NO_MODULE = "(root)", "(of no one module)"


def at_rest(memory: pd.DataFrame) -> pd.DataFrame:
    """Live bytes of each role after the last step, on the rank that holds the most of that role.

    Args:
        memory: table ``memory``; the rows with ``where == "rest"`` are used.

    Returns:
        ``run``, ``source``, ``step``, ``role``, ``bytes``: one row per run and role.

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = _of_last_step(memory[memory["where"] == REST], RUN)
    return rows.groupby([*RUN, "step", "role"], sort=False)["bytes"].max().reset_index()


def on_fullest_rank(memory: pd.DataFrame) -> pd.DataFrame:
    """Live bytes of each role after the last step, all on the rank that then holds the most, so that they add up.

    Args:
        memory: table ``memory``; the rows with ``where == "rest"`` are used.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``role``, ``bytes``: one row per run and role.

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = _of_last_step(memory[memory["where"] == REST], RUN)
    held = rows.groupby(RANK, sort=False)["bytes"].sum().reset_index()
    return rows.merge(held.loc[held.groupby(RUN)["bytes"].idxmax(), RANK], on=RANK)[[*RANK, "step", "role", "bytes"]]


def _of_last_step(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Of each run, or of each rank of one, the rows of the last step that has some."""
    return rows[rows["step"] == rows.groupby(keys)["step"].transform("max")]


def peak(memory: pd.DataFrame) -> pd.DataFrame:
    """Live bytes of each role at the run's highest peak, of equal ones the last.

    The peak is one moment on one rank, so the roles add up to it. (The maximum of each role over ranks and steps would
    mix moments that never coincided.)

    Args:
        memory: table ``memory``; the rows with ``where == "peak"`` are used.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``unit``, ``phase``, ``role``, ``bytes``: one row per run and role.
        ``unit`` is the module that was running ("model" outside all units); NA if no step was traced.

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = memory[memory["where"] == PEAK]
    moments = _on_device(rows).groupby([*RANK, "step"], sort=False)["bytes"].sum().reset_index()
    moments = moments.sort_values("step", ascending=False, kind="stable")
    highest = moments.loc[moments.groupby(RUN, sort=False)["bytes"].idxmax(), [*RANK, "step"]]
    chosen = rows.merge(highest, on=[*RANK, "step"])
    chosen = chosen.groupby([*MOMENT, "phase", "role"], sort=False, dropna=False)["bytes"].max().reset_index()
    inside = memory[~memory["where"].isin(WHOLE_STEP)]  # the unit that was running at each moment
    units = inside[[*MOMENT, "where"]].drop_duplicates(MOMENT).rename(columns={"where": "unit"})
    found = chosen.merge(units, on=MOMENT, how="left")
    return found[[*RANK, "step", "unit", "phase", "role", "bytes"]]


def peaks_of_steps(steps: pd.DataFrame) -> dict[str, int | None]:
    """What is known of the peaks of one run's steps, each on the rank where it is highest.

    Args:
        steps: table ``steps`` of one run.

    Returns:
        ``peak_bytes``; ``peak_step``, which has it, of equal ones the last; ``least_peak_bytes``, of the steps after
        the first, in which optimizer state is missing; ``unlike_step``, the last of those whose peak is not known
        although they were unlike all traced ones, or sent more. None where there is none.
    """
    by_step = steps.groupby("step")["peak_bytes"].max().dropna()
    sent = steps.groupby("step")["wire_bytes"].max()
    more = sent.index[sent > (1 + ALIKE) * sent[sent.index.isin(by_step.index)].max()]
    ends = steps.sort_values("step").drop_duplicates("rank", keep="last")
    unlike = pd.Series([*(ends["unlike_step"].dropna() if "unlike_step" in ends else ()), *more]).max()
    found = {"unlike_step": None if pd.isna(unlike) else int(unlike)}
    if by_step.empty:
        return {"peak_bytes": None, "peak_step": None, "least_peak_bytes": None, **found}
    later = by_step[by_step.index > steps["step"].min()]
    highest = int(by_step.max())
    return {
        "peak_bytes": highest, "peak_step": int(by_step.index[by_step == highest].max()),
        "least_peak_bytes": int((later if len(later) else by_step).min()), **found,
    }  # fmt: skip


def memory_over_step(
    memory: pd.DataFrame, *, run: str | None = None, step: int | None = None, rank: int | None = None
) -> pd.DataFrame:
    """Live bytes over one memory-traced step on one rank.

    Args:
        memory: table ``memory``; the rows that name a unit are used.
        run: which run; None where the table holds one.
        step: which step; None for the traced one with the highest moment.
        rank: which rank; None for the one with the highest moment.

    Returns:
        One row per moment in order of time: ``run``, ``source``, ``rank``, ``step``, ``time_us``, ``phase``, ``unit``,
        a column of bytes for each role, and ``bytes`` in total on the device. For each stretch in one unit there are
        two rows, its highest and its last moment.

    Raises:
        ValueError: a column is missing, no step was traced, or there is no such run, step or rank.
    """
    MEMORY.check(memory)
    rows = memory[~memory["where"].isin(WHOLE_STEP)]
    if not len(rows):
        raise ValueError("memory: no step was traced; trace one with recorder.step(step, trace_memory=True)")
    rows = _only(_only(one_run(rows, run), "step", step), "rank", rank)
    wide = rows.pivot_table("bytes", [*MOMENT, "phase", "where"], "role", aggfunc="max", sort=False)
    roles = [str(role) for role in Role if role in wide.columns]
    on_device = wide[[role for role in roles if role != Role.OFFLOADED]]
    wide = wide[roles].astype("Int64").assign(bytes=on_device.sum(axis=1).astype("Int64"))
    table = wide.reset_index().rename(columns={"where": "unit"}).rename_axis(columns=None)
    return table.sort_values("time_us", kind="stable", ignore_index=True)


def _on_device(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of bytes on the device; what is offloaded lies in host memory."""
    return rows[rows["role"] != str(Role.OFFLOADED)]


def _only(rows: pd.DataFrame, column: str, value: int | None) -> pd.DataFrame:
    """The rows of one step or rank; None chooses the one with the highest moment, of equal ones the last step."""
    known = sorted({int(number) for number in rows[column]})
    if value is not None and value not in known:
        raise ValueError(f"{column}: {value} was not traced; there are {', '.join(map(str, known))}")
    if value is None:
        moments = _on_device(rows).groupby([column, "rank", "time_us"])["bytes"].sum().groupby(level=0).max()
        moments = moments.sort_index(ascending=column == "rank")
        value = int(moments.index[int(moments.argmax())])
    return rows[rows[column] == value]


def allocator_items(memory: pd.DataFrame) -> pd.DataFrame:
    """What torch's CUDA allocator held after the last recorded step, on the rank whose allocator held the most.

    Args:
        memory: table ``memory``; the rows with ``where == "rest"`` and allocator columns are used; on CPU there are
            none.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``item``, ``bytes``; the items of a run add up to ``reserved_bytes``.
        An item is a role of tensors; 'library workspaces' (in no tensor of the engine: workspaces of cuBLAS and the
        like, and tensors of the rest of the program); 'rounding' (up to whole blocks); 'fragmentation' (free parts of
        segments in use); or 'cached' (free segments, kept for reuse).

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    rows = _of_last_step(memory[(memory["where"] == REST) & memory["reserved_bytes"].notna()], RUN)
    items = []
    for (run, source), own in rows.groupby(RUN, sort=False):
        most = own["reserved_bytes"].max()
        fullest = own[own["rank"] == own.loc[own["reserved_bytes"] == most, "rank"].min()]
        place = {"run": run, "source": source, "rank": fullest["rank"].iloc[0], "step": fullest["step"].iloc[0]}
        items += [place | {"item": item, "bytes": num_bytes} for item, num_bytes in _items(fullest).items()]
    return pd.DataFrame(items, columns=[*RANK, "step", "item", "bytes"])


def process_items(memory: pd.DataFrame) -> pd.DataFrame:
    """What each run's process held of the host's memory after the last recorded step, on the rank that held the most.

    Args:
        memory: table ``memory``; the rows with ``where`` 'rest' and 'process' are used. Of compute on CUDA, and on
            systems other than Linux with GNU's malloc, there are none.

    Returns:
        ``run``, ``source``, ``rank``, ``step``, ``item``, ``bytes``, ``resident_bytes``: one row per run and item, a
        role of tensors or a ``vocabulary.ProcessPart``. The items add up to the resident set, except for pages that
        change while they are read.

    Raises:
        ValueError: a column is missing.
    """
    MEMORY.check(memory)
    moment = [*RANK, "step"]
    known = memory.loc[memory["where"] == PROCESS, moment].drop_duplicates()
    rows = _of_last_step(memory[memory["where"].isin((REST, PROCESS))].merge(known, on=moment), RUN)
    most = rows.groupby(RANK, sort=False)["resident_bytes"].max().reset_index()
    most = most.loc[most.groupby(RUN, sort=False)["resident_bytes"].idxmax(), RANK]
    chosen = rows.merge(most, on=RANK)
    chosen = chosen.assign(resident_bytes=chosen.groupby(RUN)["resident_bytes"].transform("max"))
    held = chosen[chosen["bytes"] != 0].rename(columns={"role": "item"})
    return held[[*RANK, "step", "item", "bytes", "resident_bytes"]].reset_index(drop=True)


def _items(rows: pd.DataFrame) -> dict[str, int]:
    """Bytes of each item, from the rows of one moment on one rank."""
    held = {str(role): int(num_bytes) for role, num_bytes in zip(rows["role"], rows["bytes"], strict=True)}
    held.pop(Role.OFFLOADED, None)  # in host memory
    workspace = held.pop(Role.WORKSPACE)
    allocated, rounding, fragmented, reserved = (
        int(rows[f"{name}_bytes"].iloc[0]) for name in ("allocated", "rounding", "fragmented", "reserved")
    )
    beside = {
        LIBRARIES: workspace - rounding, ROUNDING: rounding, FRAGMENTED: fragmented,
        CACHED: reserved - allocated - fragmented,
    }  # fmt: skip
    return {role: num_bytes for role, num_bytes in held.items() if num_bytes} | beside


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
    last = _of_last_step(shards, RANK)
    modules = [".".join(str(name).split(".")[:-1][:depth]) or ROOT for name in last["parameter"]]
    named = by_column(last.assign(module=modules), [*RANK, "module"])
    whole = by_column(held.assign(module=NO_MODULE), [*RANK, "module"])
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
    return _of_last_step(memory[memory["where"] == REST], RANK)[[*RANK, "role", "bytes"]]


def by_column(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Bytes by the columns of ``COLUMN_OF`` and ``other_bytes``, a row for each value of ``keys``.

    Args:
        rows: with ``keys``, ``role`` and ``bytes``.
        keys: names of columns.
    """
    columns = rows["role"].astype(str).map(lambda role: COLUMN_OF.get(role, "other_bytes"))
    sums = rows.assign(column=columns).groupby([*keys, "column"], sort=False)["bytes"].sum()
    kept = [*dict.fromkeys(COLUMN_OF.values()), "other_bytes"]
    return sums.unstack(fill_value=0).reindex(columns=kept, fill_value=0).rename_axis(columns=None).astype("int64")
