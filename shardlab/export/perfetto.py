"""A run as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``: ranks are processes, tracks threads.

========================  ==============================================================================
thread of a rank          slices
========================  ==============================================================================
steps                     the steps, with their loss and times
model                     phases of the whole model, without the time in ``wait``
units                     the innermost unit that computes
host                      where a collective was issued (no duration), and the waits of the rank
data axis, ...            the collectives of each axis; those in flight together get threads of their own
========================  ==============================================================================

Arrows lead from the issue of a collective to its start, from its end to the rank that waited for it, and from the rank
that joined last to all others. Counters show live bytes by role, and the resident set of the process.

In the trace-event format times are microseconds. An event belongs to a process (``pid``) and a thread (``tid``); slices
of one thread must nest. A flow is an arrow between two slices: its ends share a name, a category and an id, and each
attaches to the slice of its thread that encloses its time. Source: "Trace Event Format", the document that Chrome and
Perfetto refer to.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.bandwidth import bandwidth
from shardlab.analysis.held_bytes import PEAK
from shardlab.analysis.intervals import concurrent_rows, innermost
from shardlab.analysis.matching import SAME, matched_collectives
from shardlab.analysis.rows import bounds, one_run
from shardlab.records.store import Records
from shardlab.records.tables import TABLES
from shardlab.vocabulary import WHOLE_MODEL, Role

STEPS, MODEL, UNITS, HOST, FIRST_AXIS = range(5)
NAMES = {STEPS: "steps", MODEL: "model", UNITS: "units", HOST: "host"}
DETAILS = (
    "op", "phase", "dtype", "numel", "bytes", "wire_bytes", "moved_bytes", "group_size", "transport", "step", "seq",
)  # fmt: skip

Event = dict[str, Any]
NS_US = 1e-3  # times are rounded to nanoseconds
PLACE = ["rank", "step"]
Arrow = tuple[str, tuple[int, int, float], tuple[int, int, float]]
Rows = list[dict[Any, Any]]


def perfetto_trace(records: Records, run: str | None = None) -> dict[str, Any]:
    """The trace as an object for ``json``.

    Args:
        records: of one run or of several.
        run: which run; None where there is one.

    Returns:
        ``traceEvents`` (sorted by time, microseconds), ``displayTimeUnit``, and ``otherData``: run, source, versions.

    Raises:
        ValueError: there is no such run, nothing to draw, times are impossible, or the ranks disagree.
    """
    name, own = run_of(records, run)
    manifest = own.manifests[name]
    threads = _axis_threads(own.collectives)
    moved = own.collectives.assign(tid=threads, pid=own.collectives["rank"].astype("int64"))
    drawn = [*_names(name, own, moved), *_steps(own), *_compute(own.spans), *_counters(own.memory)]
    rows = moved.assign(speed=bandwidth(own.collectives)["bus_gb_per_s"]).to_dict("records")
    drawn += [*_communication(rows), *_waits(rows)]
    flows = [*_on_rank(rows), *_between_ranks(moved, manifest.get("mesh"))]
    drawn += [event for number, arrow in enumerate(flows, 1) for event in flow(arrow[0], number, *arrow[1:])]
    source = next(iter([*own.spans["source"], *own.collectives["source"]]))
    other = {"run": name, "source": str(source), "versions": manifest.get("versions", {}), "time": "microseconds"}
    return {"traceEvents": in_order(drawn), "displayTimeUnit": "ms", "otherData": other}


def write_perfetto(records: Records, path: Path | str, run: str | None = None) -> Path:
    """Write the trace to ``path``, compressed if it ends with ``.gz``, and return the path.

    Raises:
        ValueError: see ``perfetto_trace``; or the file cannot be written.
    """
    return write_json(perfetto_trace(records, run), path)


def _axis_threads(collectives: pd.DataFrame) -> "pd.Series[int]":
    """The thread of each collective: a block of threads for each axis, with one for each collective in flight."""
    threads = pd.Series(0, index=collectives.index, dtype="int64")
    times, first = bounds(collectives, "start_us", "end_us", "collectives"), FIRST_AXIS
    for _, rows in collectives.groupby("axis", sort=False):
        for _, own in rows.groupby("rank", sort=False):
            threads.loc[own.index] = first + concurrent_rows(times[collectives.index.get_indexer(own.index)])
        first = int(threads.loc[rows.index].max()) + 1
    return threads


def _names(run: str, records: Records, moved: pd.DataFrame) -> Iterator[Event]:
    axes: dict[int, str] = {}
    for axis, rows in moved.groupby("axis", sort=False):
        for place, tid in enumerate(sorted(set(rows["tid"].tolist()))):
            axes[tid] = f"{axis} axis" if place == 0 else f"{axis} axis ({place + 1})"
    for pid in sorted({int(rank) for rank in [*records.spans["rank"], *records.collectives["rank"]]}):
        yield from named("process", pid, 0, f"rank {pid} ({run})", pid)
        for tid, name in {**NAMES, **axes}.items():
            yield from named("thread", pid, tid, name, tid)


def _steps(records: Records) -> Iterator[Event]:
    """A slice for each step, with its row of table ``steps``."""
    known = {(int(row["rank"]), int(row["step"])): row for row in records.steps.to_dict("records")}
    for (rank, step), times in step_times(records.spans, records.collectives).items():
        facts = {str(name): value for name, value in known.get((rank, step), {}).items() if pd.notna(value)}
        title = f"step {step}" if step >= 0 else "before the first step"
        yield complete(title, "step", (rank, STEPS), times, **facts)


def _compute(spans: pd.DataFrame) -> Iterator[Event]:
    """The innermost spans of the whole model on one thread, and of its units on another."""
    whole = spans["unit"] == WHOLE_MODEL
    for tid, rows in ((MODEL, spans[whole]), (UNITS, spans[~whole])):
        for rank in sorted(set(rows["rank"].tolist())):
            own = rows[rows["rank"] == rank]
            pieces, owners = innermost(bounds(own, "start_us", "end_us", "spans"))
            units, kinds, steps = (own[name].tolist() for name in ("unit", "kind", "step"))
            for times, owner in zip(pieces.tolist(), owners.tolist(), strict=True):
                name = kinds[owner] if tid == MODEL else f"{units[owner]} {kinds[owner]}"
                yield complete(name, kinds[owner], (rank, tid), times, step=steps[owner])


def _communication(rows: Rows) -> Iterator[Event]:
    for row in rows:
        args = {name: row[name] for name in DETAILS if pd.notna(row[name])}
        args |= {} if np.isnan(row["speed"]) else {"bus_gb_per_s": round(row["speed"], 6)}
        times = row["start_us"], row["end_us"]
        yield complete(row["tag"] or row["op"], row["op"], (row["pid"], row["tid"]), times, **args)


def _waits(rows: Rows) -> Iterator[Event]:
    """On the host: the issue of each collective, and the wait of the rank for it."""
    for row in rows:
        host, name = (row["pid"], HOST), row["tag"] or row["op"]
        yield complete(f"issue: {name}", "issue", host, (row["issue_us"], row["issue_us"]))
        if row["wait_end_us"] > row["wait_start_us"]:
            yield complete(f"wait: {name}", "wait", host, (row["wait_start_us"], row["wait_end_us"]))


def _counters(memory: pd.DataFrame) -> Iterator[Event]:
    """Live bytes by role, at rest and over each traced step; roles without bytes are left out."""
    held = memory.groupby("role")["bytes"].max()
    roles = [str(role) for role in Role if held.get(str(role), 0) > 0]
    inside = memory[(memory["where"] != PEAK) & memory["time_us"].notna()]
    places = ["rank", "time_us"]
    now = inside.pivot_table(index=places, columns="role", values="bytes", aggfunc="max", fill_value=0)
    for (rank, time_us), *sizes in now.reindex(columns=roles, fill_value=0).itertuples(name=None):
        values = {role: int(size) for role, size in zip(roles, sizes, strict=True)}
        yield counter("live bytes", int(rank), float(time_us), values)
    for rank, time_us, size in inside.drop_duplicates(places)[[*places, "resident_bytes"]].itertuples(index=False):
        if pd.notna(size):
            yield counter("resident bytes", int(rank), float(time_us), {"resident": int(size)})


def _on_rank(rows: Rows) -> Iterator[Arrow]:
    """From the issue of a collective to its start; from its end to that of the wait, if the rank really waited."""
    for row in rows:
        pid = row["pid"]
        yield "issued", (pid, HOST, row["issue_us"]), (pid, row["tid"], row["start_us"])
        if row["wait_end_us"] >= row["end_us"] > row["wait_start_us"]:
            end = _inside(row["start_us"], row["end_us"])
            yield "waited for", (pid, row["tid"], end), (pid, HOST, _inside(row["wait_start_us"], row["wait_end_us"]))


def _between_ranks(moved: pd.DataFrame, axes: Mapping[str, int] | None) -> Iterator[Arrow]:
    """From the last rank that joined a collective to each other rank, at the moment it joined."""
    sizes = moved["group_size"]
    if not len(sizes) or sizes.isna().any() or moved["rank"].nunique() < sizes.max():
        return  # no whole groups: those of a single rank have no arrows to others
    tids = dict(zip(zip(moved["rank"], moved["seq"], strict=True), moved["tid"], strict=True))
    facts = matched_collectives(moved.drop(columns=["tid", "pid"]), axes).sort_values(SAME, kind="stable")
    for _, members in groupby(facts.to_dict("records"), key=lambda row: [row[name] for name in SAME]):
        rows = list(members)
        last = next(row for row in rows if row["rank"] == row["last_rank"])
        source = int(last["rank"]), int(tids[last["rank"], last["seq"]]), last["last_us"]
        for row in rows:
            if row is not last and row["end_us"] > last["last_us"]:
                at = min(last["last_us"], _inside(row["start_us"], row["end_us"]))
                yield "the last has come", source, (int(row["rank"]), int(tids[row["rank"], row["seq"]]), at)


def _inside(start: float, end: float) -> float:
    """The last moment inside a slice: at its end the next slice may have begun."""
    return max(start, end - NS_US)


def complete(name: str, category: str, place: tuple[int, int], times: tuple[float, float], /, **args: Any) -> Event:
    """A slice: ``place`` is (pid, tid), ``times`` are beginning and end in microseconds."""
    start, end = times
    return {"ph": "X", "name": name, "cat": category, "pid": place[0], "tid": place[1], "ts": round(start, 3),
            "dur": round(end - start, 3), "args": args}  # fmt: skip


def counter(name: str, pid: int, time_us: float, values: Mapping[str, float]) -> Event:
    """A sample of a counter; several values are drawn stacked."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": round(time_us, 3), "args": dict(values)}


def flow(name: str, number: int, start: tuple[int, int, float], end: tuple[int, int, float]) -> list[Event]:
    """An arrow from one slice to another; each end is (pid, tid, time), with the time inside its slice."""
    both = {"name": name, "cat": "flow", "id": number}
    first, last = ({"pid": pid, "tid": tid, "ts": round(time_us, 3)} for pid, tid, time_us in (start, end))
    return [{"ph": "s", **both, **first}, {"ph": "f", "bp": "e", **both, **last}]


def named(kind: str, pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    """The name of a process or a thread, and its place among the others."""
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield {"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "ts": 0, "args": args}


def in_order(events: Iterable[Event]) -> list[Event]:
    """Names first, then by time; of slices that begin together the longer first, because it encloses the other."""
    return sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0.0), -event.get("dur", 0.0)))


def write_json(trace: Mapping[str, Any], path: Path | str) -> Path:
    """Write a trace, compressed if the name ends with ``.gz``, make its directory, and return its path.

    Raises:
        ValueError: the file cannot be written.
    """
    path = Path(path)
    # NaN and Infinity are not JSON: viewers could not read the file.
    text = json.dumps(trace, separators=(",", ": "), allow_nan=False).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ValueError(f"output: {path} cannot be written: {error.strerror}") from error
    return path


def run_of(records: Records, run: str | None) -> tuple[str, Records]:
    """The name and the records of ``run``; None if there is only one.

    Raises:
        ValueError: there is no such run, there are several and none is named, or there are no spans and no collectives.
    """
    both = pd.concat([records.spans[["run", "source"]], records.collectives[["run", "source"]]])
    if not len(both):
        raise ValueError("run: these records have no spans and no collectives, so there is nothing to export")
    name, source = one_run(both, run)[["run", "source"]].iloc[0]
    own = {
        table: rows[(rows["run"] == name) & (rows["source"] == source)].reset_index(drop=True)
        for table, rows in ((table, getattr(records, table)) for table in TABLES)
    }
    return name, Records(**own, manifests={name: records.manifests.get(name, {})})


def step_times(spans: pd.DataFrame, collectives: pd.DataFrame) -> dict[tuple[int, int], tuple[float, float]]:
    """Beginning and end of each (rank, step) on the host, in microseconds; the end of a collective does not count."""
    own = (
        spans[[*PLACE, "start_us", "end_us"]],
        collectives[[*PLACE, "issue_us", "issue_us"]],
        collectives[[*PLACE, "wait_start_us", "wait_end_us"]],
    )
    events = pd.concat([table.set_axis([*PLACE, "begin", "end"], axis=1) for table in own])
    found = events.groupby(PLACE).agg({"begin": "min", "end": "max"})
    return {(int(rank), int(step)): (float(begin), float(end)) for (rank, step), begin, end in found.itertuples()}
