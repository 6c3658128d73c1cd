"""Importing traces of torch.profiler into our tables, so that every figure and the overlap work on them too.

A trace has collectives and compute, but no waits, memory by role, shards or losses: those stay empty. The overlap of a
GPU trace is defined as in Holistic Trace Analysis, but counts more: HTA leaves out the last step, and all communication
whose kernels are not named ``nccl...Kernel``. On a CPU, compute is what operators do.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from shardlab.analysis.overlap import overlap
from shardlab.export.kineto import RankTrace, of_file, read_traces
from shardlab.export.profiled_rank import Row, communication, compute, issues
from shardlab.tables import COLLECTIVES, MEMORY, SHARDS, SPANS, STEPS
from shardlab.trace.store import Records
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
            ``op="unknown communication"`` and without a size. Or a rank issued collectives, and none of them ran in
            the trace.
    """
    traces = read_traces(path)
    origin_us = min((one.start_us for trace in traces for one in trace.slices), default=0.0)
    spans, collectives, steps = [], [], []
    for trace in traces:
        with of_file(trace.path):
            marks, keys = _steps(trace), {"run": run, "source": "measured", "rank": trace.rank}
            spans += [keys | {"step": _step_at(issued_us, marks)} | row for issued_us, row in compute(trace)]
            collectives += [
                keys | {"step": _step_at(row["issue_us"], marks), "seq": seq} | row
                for seq, row in enumerate(communication(trace))
            ]
            steps += [keys | {"step": step, "step_us": end - start} for step, (start, end) in marks.items()]
    with of_file(Path(path)):  # a number may be too large for its column
        tables = {"collectives": COLLECTIVES.frame(collectives), "spans": SPANS.frame(spans)}
    for name, table in tables.items():
        times = [column for column in table.columns if column.endswith("_us")]
        tables[name] = table.assign(**{column: table[column] - origin_us for column in times})
    _say_what_is_not_known(tables["collectives"], traces)
    manifest = {"run": run, "ranks": max(trace.num_ranks for trace in traces), "imported_from": Path(path).name}
    return Records(
        **tables, memory=MEMORY.frame([]), shards=SHARDS.frame([]), steps=_step_table(steps, **tables),
        manifests={run: manifest},
    )  # fmt: skip


def _steps(trace: RankTrace) -> Steps:
    """Those that ``profile.step()`` marked. (An empty mark is no step: our export to HTA ends with one.)"""
    marks = [one for one in trace.of("user_annotation") if one.name.startswith(STEP_MARK) and one.end_us > one.start_us]
    return {int(np.int64(one.name.removeprefix(STEP_MARK))): (one.start_us, one.end_us) for one in marks}


def _step_at(time_us: float, steps: Steps) -> int:
    """The step at a time; -1 outside all steps, and 0 where none is marked."""
    found = (step for step, (start, end) in steps.items() if start <= time_us <= end)
    return next(found, OUTSIDE if steps else 0)


def _say_what_is_not_known(collectives: pd.DataFrame, traces: Sequence[RankTrace]) -> None:
    moving = set(collectives["rank"])
    if silent := [trace.rank for trace in traces if trace.rank not in moving and issues(trace)]:
        warnings.warn(
            f"trace: ranks {silent} issued collectives, but the trace does not say when they ran, so their "
            "communication is missing; profile with ProfilerActivity.CUDA too",
            stacklevel=3,
        )
    tags = collectives.loc[collectives["op"] == Collective.UNKNOWN, "tag"].value_counts()
    if len(tags):
        names = ", ".join(f"{tag} ({number})" for tag, number in tags.head(NAMED).items())
        more = f" and {len(tags) - NAMED} others" if len(tags) > NAMED else ""
        warnings.warn(
            f"trace: no name says which collective these kernels are, so they count as {Collective.UNKNOWN}, and their "
            f"bytes as not known: {names}{more}",
            stacklevel=3,
        )


def _step_table(steps: Sequence[Row], collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """What is known of each step; a trace without marks is one step."""
    measures = {(row["rank"], row["step"]): row for row in overlap(collectives, spans).to_dict("records")}
    sent = collectives.groupby(["rank", "step"])["wire_bytes"].agg(lambda sizes: sizes.sum(skipna=False))
    table = []
    for row in steps or [_whole(key, collectives, spans) for key in measures]:
        key = row["rank"], row["step"]
        measure = measures.get(key, {})
        communicates = measure.get("comm_us", 0) > 0
        known = {
            "exposed_comm_us": measure["exposed_us"] if communicates else np.nan,
            "overlap": measure.get("overlap", np.nan), "wire_bytes": sent.get(key, 0.0),
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
