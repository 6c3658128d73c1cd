"""A run as a directory for Holistic Trace Analysis: for each rank a file shaped like a profiler's trace of a GPU.

HTA reads kernels on streams, recognises communication by names that begin with ``nccl``, and drops fractions of a
microsecond. So compute becomes kernels on one stream, each axis of the mesh becomes a stream of collectives, and times
become whole microseconds. Launches stand where the host issued them. The file says that these are no real kernels.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import innermost
from shardlab.analysis.overlap import compute_spans
from shardlab.analysis.rows import bounds, in_timed_steps
from shardlab.export.kineto import NCCL_NAMES
from shardlab.export.perfetto import Event, complete, in_order, run_of, step_times, write_json
from shardlab.records.store import Records
from shardlab.vocabulary import SpanKind

HOST_PID, DEVICE_PID = 1000, 0  # as in a profiler's trace: the process, and the index of the device
THREAD, COMPUTE_STREAM, FIRST_AXIS_STREAM = 1, 7, 20
# HTA stores row numbers in the smallest type that holds these numbers, so they must be large, as a profiler's are.
FIRST_CORRELATION = 1_000_000
NOTE = "not kernels: compute and collectives of a record, in the shape of GPU kernels"


def export_hta(records: Records, directory: Path | str, run: str | None = None) -> list[Path]:
    """Write ``rankN.json`` for each rank and return the paths.

    The files hold the steps whose times count: neither the first nor those in which memory was traced, unless there are
    no others, and nothing that was sent to report the loss. ``TraceAnalysis(trace_dir=directory)
    .get_comm_comp_overlap()`` then gives for each rank what ``analysis.overlap.hidden_share`` gives, but for the
    rounding to whole microseconds; their median is the column "hidden" of a comparison.

    Args:
        records: of one run or of several.
        directory: a new or an empty directory: HTA would read other traces too.
        run: which run; None where there is one.

    Raises:
        ValueError: there is no such run, it is empty, times are impossible, or ``directory`` is not empty.
    """
    name, own = run_of(records, run)
    collectives, spans = in_timed_steps(own.collectives, own.spans, own.steps[own.steps["step"] >= 0])
    ranks = sorted({int(rank) for rank in [*spans["rank"], *collectives["rank"]]})
    if not ranks:
        raise ValueError(f"run: {name} has no finished step to analyse")
    directory = _new(Path(directory))
    streams = {axis: FIRST_AXIS_STREAM + place for place, axis in enumerate(collectives["axis"].drop_duplicates())}
    written = []
    for rank in ranks:
        mine, moved = spans[spans["rank"] == rank], collectives[collectives["rank"] == rank]
        events = [*_steps(mine, moved), *_data(mine), *_compute(mine, moved), *_communication(moved, streams)]
        about = {"backend": "nccl", "rank": rank, "world_size": len(ranks)}
        written.append(write_json(_trace(name, about, events), directory / f"rank{rank}.json"))
    return written


def _new(directory: Path) -> Path:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"output: {directory} must be a new or an empty directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: {directory} cannot be made: {error.strerror}") from error
    return directory


def _trace(name: str, about: dict[str, Any], events: list[Event]) -> dict[str, Any]:
    return {
        "schemaVersion": 1, "deviceProperties": [{"id": DEVICE_PID, "name": NOTE}], "distributedInfo": about,
        "traceName": f"{name}: {NOTE}", "displayTimeUnit": "ms", "traceEvents": in_order(_with_launches(events)),
    }  # fmt: skip


def _steps(spans: pd.DataFrame, collectives: pd.DataFrame) -> Iterator[Event]:
    """A mark for each step, and an empty one at the end: HTA drops the last, which a profiler may have cut off."""
    marks = {step: times for (_, step), times in step_times(spans, collectives).items()}
    last = max(marks)
    after_all = max([*spans["end_us"], *collectives["end_us"]]) + 1
    for step, times in {**marks, last + 1: (after_all, after_all)}.items():
        yield _slice(f"ProfilerStep#{step}", "user_annotation", (HOST_PID, THREAD), times)


def _data(spans: pd.DataFrame) -> Iterator[Event]:
    for row in spans[spans["kind"] == str(SpanKind.DATA)].to_dict("records"):
        name = "enumerate(DataLoader)#next"
        yield _slice(name, "user_annotation", (HOST_PID, THREAD), (row["start_us"], row["end_us"]))


def _compute(spans: pd.DataFrame, collectives: pd.DataFrame) -> Iterator[Event]:
    """The innermost unit that computes, outside waits; in lower case, because HTA looks for 'Sync' and 'Memset'."""
    rows = compute_spans(spans)
    waited = collectives[collectives["wait_start_us"].notna()]
    waits = bounds(waited, "wait_start_us", "wait_end_us", "collectives")
    pieces, owners = innermost(bounds(rows, "start_us", "end_us", "spans"), waits)
    names = [f"{kind} {unit}".lower() for kind, unit in zip(rows["kind"], rows["unit"], strict=True)]
    for times, owner in zip(pieces.tolist(), owners.tolist(), strict=True):
        yield _kernel(names[owner], COMPUTE_STREAM, times, times[0])


def _communication(collectives: pd.DataFrame, streams: dict[str, int]) -> Iterator[Event]:
    bounds(collectives, "start_us", "end_us", "collectives")
    for row in collectives.to_dict("records"):
        times = row["start_us"], row["end_us"]
        args = {
            "Collective name": row["op"], "In msg nelems": row["numel"], "Out msg nelems": row["numel"],
            "Group size": row["group_size"], "dtype": row["dtype"], "Process Group Description": row["axis"],
            "Tag": row["tag"],
        }  # fmt: skip
        event = _kernel(f"ncclDevKernel_{NCCL_NAMES[row['op']]}", streams[row["axis"]], times, row["issue_us"])
        event["args"] |= {name: value for name, value in args.items() if pd.notna(value)}
        yield event


def _kernel(name: str, stream: int, times: tuple[float, float], issued_us: float) -> Event:
    event = _slice(name, "kernel", (DEVICE_PID, stream), times)
    event["args"] = {"device": DEVICE_PID, "stream": stream, "issued": round(issued_us)}
    return event


def _with_launches(events: list[Event]) -> Iterator[Event]:
    """The events, and for each kernel a launch with the same correlation number."""
    for number, event in enumerate(events, FIRST_CORRELATION):
        yield event
        if event["cat"] == "kernel":
            issued = event["args"].pop("issued")
            event["args"]["correlation"] = number
            launch = _slice("cudaLaunchKernel", "cuda_runtime", (HOST_PID, THREAD), (issued, issued))
            yield {**launch, "args": {"correlation": number}}


def _slice(name: str, category: str, place: tuple[int, int], times: tuple[float, float]) -> Event:
    start, end = np.rint(times).astype(int).tolist()
    return complete(name, category, place, (start, end))
