"""One recorded training step as a list of events in order of time, and the state of each rank after each event.

An event is one of these, on one rank:

=========  ============================================================================================
computes   a unit begins forward, backward or recomputation; or the optimizer or data loading begins
ends       it has finished, or does not go on before the rank has waited or been off the CPU
pauses     the rank goes off the CPU: it sleeps, or its core runs something else
resumes    it is back
gathers    an all-gather is issued
reduces    an all-reduce or a reduce-scatter is issued
sends      another collective is issued
arrives    the result of a collective has arrived
waits      the rank waits for a collective
goes on    the wait is over
holds      live bytes have grown since the last sample
frees      live bytes have shrunk
=========  ============================================================================================

Live bytes come from the samples of table ``memory``: at the borders of units in a memory-traced step, else at rest.
"""

from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.held_bytes import WHOLE_STEP
from shardlab.analysis.rows import of_steps, one_run, one_step
from shardlab.plots.text import format_bytes
from shardlab.records.store import Records
from shardlab.vocabulary import WHOLE_MODEL, Collective, Role, SpanKind

ROLES = tuple(map(str, Role))
LEAST_CHANGE = 1e-3  # of the live bytes: smaller changes are added up until they reach it
COLUMNS = ("time_us", "rank", "event", "what", "bytes", "words", *ROLES)


class StepEvent(StrEnum):
    """Kinds of events; the head of this file explains them.

    Their order is that of events at the same moment: what ends comes before what begins.
    """

    ARRIVES = "arrives"
    GOES_ON = "goes on"
    RESUMES = "resumes"
    ENDS = "ends"
    FREES = "frees"
    HOLDS = "holds"
    COMPUTES = "computes"
    GATHERS = "gathers"
    REDUCES = "reduces"
    SENDS = "sends"
    WAITS = "waits"
    PAUSES = "pauses"


ISSUE = {
    Collective.ALL_GATHER: StepEvent.GATHERS,
    Collective.REDUCE_SCATTER: StepEvent.REDUCES,
    Collective.ALL_REDUCE: StepEvent.REDUCES,
}
ISSUES = (StepEvent.GATHERS, StepEvent.REDUCES, StepEvent.SENDS)
OF_NO_UNIT = {SpanKind.DATA: "loading data", SpanKind.OPTIMIZER: "the optimizer's step"}
Row = dict[str, Any]


def events_of_step(records: Records, *, run: str | None = None, step: int | None = None) -> pd.DataFrame:
    """The events of one step of one run on all ranks, in order of time.

    Args:
        records: records of one run or several.
        run: which run; None if there is only one.
        step: which step; None for the traced one with the highest peak, else the last.

    Returns:
        One row per event: ``time_us`` from the beginning of the step, ``rank``, ``event``, ``what`` (unit, tag),
        ``bytes`` (moved, or the change in live bytes; NA for compute), ``words`` (a sentence), and the rank's live
        bytes of each role after the event (NA if memory was not recorded).

    Raises:
        ValueError: there is no such run or step, there are several runs and none is named, or nothing was recorded.
    """
    steps = one_run(records.steps[records.steps["step"] >= 0], run)
    step = one_step(steps, traced_step(steps) if step is None else step)
    name, source = str(steps["run"].iloc[0]), str(steps["source"].iloc[0])
    collectives, spans, memory = (
        table[(table["run"] == name) & (table["source"] == source)]
        for table in (records.collectives, records.spans, records.memory)
    )
    collectives, spans = (table[table["step"] == step] for table in (of_steps(collectives), spans))
    rows = [*_compute(spans), *_communication(collectives), *_memory(memory, step)]
    if not rows:
        raise ValueError(f"step: {step} of run {name!r} has neither compute nor communication recorded")
    order = list(StepEvent)
    rows.sort(key=lambda row: (row["time_us"], order.index(row["event"]), row["rank"]))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    begin = np.nanmin([collectives["issue_us"].min(), spans["start_us"].min()])  # the zero of the timeline
    table["time_us"] = (table["time_us"] - begin).clip(lower=0.0)
    return _filled(table, _resting(memory, step)).astype({"bytes": "Int64", **dict.fromkeys(ROLES, "Int64")})


def ranks_at(events: pd.DataFrame, index: int) -> pd.DataFrame:
    """The state of every rank after event number ``index``.

    Args:
        events: from ``events_of_step``.
        index: from 0.

    Returns:
        One row per rank: ``rank``, ``computes`` (the innermost unit), ``in_flight`` (tags, oldest first),
        ``waits_for``, and live bytes by role.

    Raises:
        ValueError: there is no such event.
    """
    if not 0 <= index < len(events):
        raise ValueError(f"index: {index} is not one of the {len(events)} events, 0 to {len(events) - 1}")
    past, held, rows = events.iloc[: index + 1], _held_after(events, index), []
    for rank in sorted(held):
        own = past[past["rank"] == rank]
        computes = _under_way(own, (StepEvent.COMPUTES,), StepEvent.ENDS)
        waits = _under_way(own, (StepEvent.WAITS,), StepEvent.GOES_ON)
        rows.append({
            "rank": rank, "computes": computes[-1] if computes and not waits else "",
            "in_flight": ", ".join(_under_way(own, ISSUES, StepEvent.ARRIVES)), "waits_for": waits[-1] if waits else "",
            **held[rank],
        })  # fmt: skip
    return pd.DataFrame(rows).astype(dict.fromkeys(ROLES, "Int64"))


def _under_way(events: pd.DataFrame, begins: Collection[str], ends: str) -> list[str]:
    """What has begun and not ended after the events of one rank, the oldest first."""
    found = list[str]()
    for event, what in zip(events["event"], events["what"], strict=True):
        if event in begins:
            found.append(what)
        elif event == ends and what in found:
            found.remove(what)
    return found


def _held_after(events: pd.DataFrame, index: int) -> dict[int, Row]:
    """Bytes by role of each rank: after its latest event, else before its first."""
    firsts, past = events.drop_duplicates("rank"), events.iloc[: index + 1]
    rows = pd.concat([firsts, past]).drop_duplicates("rank", keep="last").set_index("rank")
    return {int(rank): dict(rows.loc[rank, list(ROLES)]) for rank in rows.index}


def traced_step(steps: pd.DataFrame) -> int | None:
    """Of the steps whose memory was traced the one with the highest peak, of equal ones the last; None if none was."""
    traced = steps[steps["traced_memory"].fillna(False).astype(bool)].sort_values(["peak_bytes", "step"])
    return int(traced["step"].iloc[-1]) if len(traced) else None


def _compute(spans: pd.DataFrame) -> Iterator[Row]:
    for row in spans.to_dict("records"):
        if row["kind"] == SpanKind.OFF_CPU:
            what, where = str(row["unit"]), "" if row["unit"] == WHOLE_MODEL else f" in {row['unit']}"
            begins, begins_words = StepEvent.PAUSES, f"goes off the CPU{where}"
            ends, ends_words = StepEvent.RESUMES, f"is back on the CPU{where}"
        else:
            what = OF_NO_UNIT.get(row["kind"], f"{row['kind']} of {row['unit']}")
            begins, begins_words = StepEvent.COMPUTES, f"begins {what}"
            ends, ends_words = StepEvent.ENDS, f"is through with {what}"
        common = {"rank": int(row["rank"]), "what": what, "bytes": None}
        yield {**common, "time_us": row["start_us"], "event": begins, "words": begins_words}
        yield {**common, "time_us": row["end_us"], "event": ends, "words": ends_words}


def _communication(collectives: pd.DataFrame) -> Iterator[Row]:
    for row in collectives.to_dict("records"):
        tag, size = str(row["tag"]), format_bytes(row["bytes"])
        op, sent = str(row["op"]).replace("_", "-"), format_bytes(float(row["wire_bytes"]))
        common = {"rank": int(row["rank"]), "what": tag, "bytes": row["bytes"]}
        issued = f"issues an {op} of {tag}: {size}, of which it sends {sent}"
        yield {**common, "time_us": row["issue_us"], "event": ISSUE.get(row["op"], StepEvent.SENDS), "words": issued}
        yield {**common, "time_us": row["end_us"], "event": StepEvent.ARRIVES, "words": f"has {tag} ({op}, {size})"}
        if pd.notna(row["wait_start_us"]) and row["wait_end_us"] > row["wait_start_us"]:
            waits, goes_on = f"waits for {tag}", f"goes on: {tag} is there"
            yield {**common, "time_us": row["wait_start_us"], "event": StepEvent.WAITS, "words": waits}
            yield {**common, "time_us": row["wait_end_us"], "event": StepEvent.GOES_ON, "words": goes_on}


def _memory(memory: pd.DataFrame, step: int) -> Iterator[Row]:
    """An event for each sample in the step that differs from the previous one of the same rank."""
    inside = memory[(memory["step"] == step) & ~memory["where"].isin(WHOLE_STEP)]
    for rank, rows in inside.groupby("rank"):
        wide = rows.pivot_table(index=["time_us", "where"], columns="role", values="bytes", aggfunc="max", sort=False)
        before: Row | None = None
        for held in wide.sort_index(level="time_us").reset_index().to_dict("records"):
            after, where = {role: int(held.get(role, 0)) for role in ROLES}, str(held["where"])
            changes = {role: after[role] - (before or after)[role] for role in ROLES}
            if before is None or sum(map(abs, changes.values())) >= LEAST_CHANGE * sum(before.values()):
                change = sum(changes.values())
                begins = f"begins with {format_bytes(sum(after.values()))}"
                yield {
                    "rank": rank, "time_us": held["time_us"], "what": where, "bytes": abs(change), **after,
                    "event": StepEvent.FREES if change < 0 else StepEvent.HOLDS,
                    "words": begins if before is None else _in_words(changes, where),
                }  # fmt: skip
                before = after


def _in_words(changes: dict[str, int], where: str) -> str:
    """'in blocks.2 holds 1.20 MB more activation; frees 300 kB of gathered parameter'."""
    moves = sorted(((change, role.replace("_", " ")) for role, change in changes.items()), reverse=True)
    grown = ", ".join(f"{format_bytes(change)} more {role}" for change, role in moves if change > 0)
    freed = ", ".join(f"{format_bytes(-change)} of {role}" for change, role in reversed(moves) if change < 0)
    parts = (f"holds {grown}" if grown else "", f"frees {freed}" if freed else "")
    return f"in {where} {'; '.join(filter(None, parts))}"


def _resting(memory: pd.DataFrame, step: int) -> dict[Any, Row]:
    """Bytes each rank held at rest: after the last sampled step before this one, else after the first."""
    rest = memory[memory["where"] == "rest"]
    found = {}
    for rank, rows in rest.groupby("rank"):
        earlier = rows[rows["step"] < step]
        nearest = earlier["step"].max() if len(earlier) else rows["step"].min()
        by_role = rows[rows["step"] == nearest].set_index("role")["bytes"]
        found[rank] = {role: int(by_role.get(role, 0)) for role in ROLES}
    return found


def _filled(table: pd.DataFrame, resting: dict[Any, Row]) -> pd.DataFrame:
    """Fill in the live bytes of every row from the last sample before it, or from the first sample.

    A step without samples gets the bytes at rest.
    """
    roles = list(ROLES)
    table[roles] = table.groupby("rank")[roles].ffill()
    table[roles] = table.groupby("rank")[roles].bfill()
    for rank, held in resting.items():
        rows = table["rank"] == rank
        table.loc[rows, roles] = table.loc[rows, roles].fillna(held)
    return table
