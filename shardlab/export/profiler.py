"""Importing traces of torch.profiler into our tables, so that every figure and the overlap work on them too.

A trace has collectives and compute, but no waits, memory by role, shards or losses: those stay empty. The overlap of a
GPU trace is defined as in Holistic Trace Analysis, but counts more: HTA leaves out the last step, and all communication
whose kernels are not named ``nccl...Kernel``. On a CPU, compute is what operators do.

A kernel belongs to the step whose host launched it, whenever it runs; one that was launched before the trace began, to
no step. What the trace does not say is NaN: the exposed time of a rank whose kernels are missing, and that of a step
whose communication lasted longer than the step, because the host ran ahead of its device.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from shardlab.analysis.overlap import overlap
from shardlab.export.kineto import RankTrace, of_file, read_traces
from shardlab.export.profiled_rank import Row, communication, compute, has_device, issues, uncertain
from shardlab.records.store import Records
from shardlab.records.tables import COLLECTIVES, MEMORY, SHARDS, SPANS, STEPS
from shardlab.vocabulary import Collective

STEP_MARK = "ProfilerStep#"
OUTSIDE = -1
NAMED = 5
Steps = dict[int, tuple[float, float]]
"""Beginning and end of each step, in microseconds."""


def import_profiler_trace(path: Path | str, run: str = "profiler") -> Records:
    """The collectives, spans and steps of a trace, or of a directory with one trace per rank.

    Args:
        path: what ``profile.export_chrome_trace`` wrote: a ``.json`` or ``.json.gz``, or a directory of them. The sizes
            of gloo's collectives need ``record_shapes=True``, steps need ``profile.step()``.
        run: name of the run in the records.

    Returns:
        Records with ``source="measured"``. A span's ``unit`` is the operator or kernel. Sizes that the trace
        does not contain are NA, times of waits NaN.

    Raises:
        ValueError: there is no such file, no trace in it, one is damaged, two have the same rank, or a clock ran
            backwards.

    Warns:
        UserWarning: kernels communicate, and no name says which collective they are: they are rows with
            ``op="unknown communication"`` and without a size. Or kernels that no table knows look like communication:
            they count as compute, and the manifest names them (``uncertain_kernels``). Or a rank issued collectives,
            and none of them ran in the trace; or its device's kernels are missing, or all their launches.
    """
    traces = read_traces(path)
    origin_us = min((one.start_us for trace in traces for one in trace.slices), default=0.0)
    spans, collectives, steps = [], [], []
    for trace in traces:
        with of_file(trace.path):
            marks, keys = _steps(trace), {"run": run, "source": "measured", "rank": trace.rank}
            spans += [keys | {"step": _step_at(issued_us, marks)} | row for issued_us, row in compute(trace)]
            collectives += [
                keys | {"step": _step_at(issued_us, marks), "seq": seq} | row
                for seq, (issued_us, row) in enumerate(communication(trace))
            ]
            steps += [keys | {"step": step, "step_us": end - start} for step, (start, end) in marks.items()]
    with of_file(Path(path)):  # a number may be too large for its column
        tables = {"collectives": COLLECTIVES.frame(collectives), "spans": SPANS.frame(spans)}
    for name, table in tables.items():
        times = [column for column in table.columns if column.endswith("_us")]
        tables[name] = table.assign(**{column: table[column] - origin_us for column in times})
    doubtful, idle = sum(map(uncertain, traces), Counter[str]()), _without_kernels(tables["spans"], traces)
    _say_what_is_not_known(tables["collectives"], traces, idle, doubtful)
    manifest = {
        "run": run, "ranks": max(trace.num_ranks for trace in traces), "imported_from": Path(path).name,
        "uncertain_kernels": dict(doubtful),
    }  # fmt: skip
    return Records(
        **tables, memory=MEMORY.frame([]), shards=SHARDS.frame([]), manifests={run: manifest},
        steps=_step_table(steps, idle, **tables),
    )  # fmt: skip


def _steps(trace: RankTrace) -> Steps:
    """Those that ``profile.step()`` marked; an empty mark is no step."""
    marks = [one for one in trace.of("user_annotation") if one.name.startswith(STEP_MARK) and one.end_us > one.start_us]
    return {int(np.int64(one.name.removeprefix(STEP_MARK))): (one.start_us, one.end_us) for one in marks}


def _step_at(time_us: float, steps: Steps) -> int:
    """The step at a time; -1 outside all steps, and 0 where none is marked."""
    found = (step for step, (start, end) in steps.items() if start <= time_us <= end)
    return next(found, OUTSIDE if steps else 0)


def _without_kernels(spans: pd.DataFrame, traces: Sequence[RankTrace]) -> list[int]:
    """Ranks that have a device, of which the trace does not say what it computed, or not in which step."""
    known = set(spans.loc[spans["step"] != OUTSIDE, "rank"])
    return [trace.rank for trace in traces if has_device(trace) and trace.rank not in known]


def _say_what_is_not_known(
    collectives: pd.DataFrame, traces: Sequence[RankTrace], idle: Sequence[int], doubtful: Mapping[str, int]
) -> None:
    moving = set(collectives["rank"])
    if silent := [trace.rank for trace in traces if trace.rank not in moving and issues(trace)]:
        _warn(
            f"ranks {silent} issued collectives, but the trace does not say when they ran, so their "
            "communication is missing; profile with ProfilerActivity.CUDA too"
        )
    if idle:
        _warn(
            f"ranks {idle} had a device, but the trace lacks its kernels or their launches, so what they computed and "
            "what that hid is not known; profile with ProfilerActivity.CUDA and CPU, or if they computed on the CPU, "
            "with CUDA_VISIBLE_DEVICES="
        )
    tags = collectives.loc[collectives["op"] == Collective.UNKNOWN, "tag"].value_counts()
    if len(tags):
        _warn(
            f"no name says which collective these kernels are, so they count as {Collective.UNKNOWN}, and their "
            f"bytes as not known: {_named({str(tag): int(number) for tag, number in tags.items()})}"
        )
    if doubtful:
        _warn(
            "these kernels look like communication, and no table knows them, so they count as compute, and what is "
            f"exposed or hidden is uncertain: {_named(doubtful)}"
        )


def _warn(said: str) -> None:
    warnings.warn(f"trace: {said}", stacklevel=4)  # at the caller of the import


def _named(numbers: Mapping[str, int]) -> str:
    """The most frequent names, each with its number."""
    first = sorted(numbers.items(), key=lambda pair: -pair[1])
    more = f" and {len(first) - NAMED} others" if len(first) > NAMED else ""
    return ", ".join(f"{name} ({number})" for name, number in first[:NAMED]) + more


def _step_table(
    steps: Sequence[Row], idle: Sequence[int], collectives: pd.DataFrame, spans: pd.DataFrame
) -> pd.DataFrame:
    """What is known of each step; a trace without marks is one step."""
    measures = {(row["rank"], row["step"]): row for row in overlap(collectives, spans).to_dict("records")}
    sent = collectives.groupby(["rank", "step"])["wire_bytes"].agg(lambda sizes: sizes.sum(skipna=False))
    table = []
    for row in steps or [_whole(key, collectives, spans) for key in measures]:
        key = row["rank"], row["step"]
        is_idle = row["rank"] in idle
        measure = {} if is_idle else measures.get(key, {})
        exposed_us = measure["exposed_us"] if measure.get("comm_us", 0) > 0 else np.nan
        known = {
            "exposed_comm_us": exposed_us if exposed_us <= row["step_us"] else np.nan,
            "overlap": measure.get("overlap", np.nan), "wire_bytes": sent.get(key, np.nan if is_idle else 0.0),
        }  # fmt: skip
        unknown = {"loss": np.nan, "grad_norm": np.nan, "learning_rate": np.nan, "peak_bytes": None, "num_tokens": None}
        table.append(row | known | unknown | {"traced_memory": False})
    return STEPS.frame(table)


def _whole(key: tuple[int, int], collectives: pd.DataFrame, spans: pd.DataFrame) -> Row:
    """The one step of a rank without marks: from the first to the last event of its trace."""
    rows = pd.concat([table[table["rank"] == key[0]] for table in (collectives, spans)])
    length = rows["end_us"].max() - rows[["issue_us", "start_us"]].min().min()
    names = {name: str(rows[name].iloc[0]) for name in ("run", "source")}
    return {**names, "rank": key[0], "step": key[1], "step_us": length}
