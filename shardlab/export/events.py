"""What an export writes: one run of the records, its steps, and events in the trace-event format.

Times are microseconds. An event belongs to a process (``pid``) and a thread (``tid``); slices of one thread must nest.
A flow is an arrow between two slices: its ends share a name, a category and an id, and each attaches to the slice of
its thread that encloses its time. Source: "Trace Event Format", the document that Chrome and Perfetto refer to.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.analysis.rows import one_run
from shardlab.tables import TABLES
from shardlab.trace.store import Records

Event = dict[str, Any]
NS_US = 1e-3  # times are rounded to nanoseconds
PLACE = ["rank", "step"]


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


def process(pid: int, name: str) -> list[Event]:
    """The name of a process and its position among the others."""
    return [_metadata("process_name", pid, 0, name=name), _metadata("process_sort_index", pid, 0, sort_index=pid)]


def thread(pid: int, tid: int, name: str) -> list[Event]:
    """The name of a thread and its position among the others."""
    return [_metadata("thread_name", pid, tid, name=name), _metadata("thread_sort_index", pid, tid, sort_index=tid)]


def in_order(events: Iterable[Event]) -> list[Event]:
    """Names first, then by time; of slices that begin together the longer first, because it encloses the other."""
    return sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0.0), -event.get("dur", 0.0)))


def write_json(trace: Mapping[str, Any], path: Path | str) -> Path:
    """Write a trace, compressed if the name ends with ``.gz``, and return its path.

    Raises:
        ValueError: the file cannot be written.
    """
    path = Path(path)
    # NaN and Infinity are not JSON: viewers could not read the file.
    text = json.dumps(trace, separators=(",", ": "), allow_nan=False).encode()
    try:
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ValueError(f"output: {path} cannot be written: {error.strerror}") from error
    return path


def _metadata(kind: str, pid: int, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


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
