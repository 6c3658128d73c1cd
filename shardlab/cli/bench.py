"""``shardlab bench``: our engines against torch's own, on this machine."""

import json as json_text
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardlab.cli.console import count, names_in, progress_bar, refuse_others, table_of
from shardlab.vocabulary import HostTransport

if TYPE_CHECKING:
    from shardlab.bench.against_torch import BenchRow, Workload

NOTE = (
    "ms: medians; time ratio: our step over theirs in the same round, median and quartiles, below 1 if ours is faster; "
    "peak ratio: our highest live bytes over theirs; floor: each rank trains the whole model alone; over floor: our "
    "step over that. The row 'itself' is one engine twice: its ratio and quartiles are what chance alone makes here."
)

SHARED_NOTE = (
    "Our engines send through shared memory, torch's over gloo, the only transport they have here; with "
    "--transport gloo both use gloo, and only the engines differ. Peaks leave out memory outside torch: the shared "
    "memory, and gloo's own buffers."
)

RATIOS = ["ours_over_floor", "ratio_median", "peak_ratio"]
COLUMNS = {
    "ours": "ours", "theirs": "theirs", "ours_ms": "ours (ms)", "theirs_ms": "theirs (ms)", "floor_ms": "floor (ms)",
    "ours_over_floor": "over (floor)", "ratio_median": "time (ratio)", "quartiles": "quartiles",
    "peak_ratio": "peak (ratio)",
}  # fmt: skip


ALL_WORKLOADS = "compute,communication,latency"
ALL_PAIRS = "bucketed,zero1,fsdp,tensor_parallel,pipeline,itself"


def bench(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: a few minutes on two cores.")] = False,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    workloads: Annotated[str, typer.Option(help="Comma-separated, of these.")] = ALL_WORKLOADS,
    pairs: Annotated[str, typer.Option(help="Comma-separated, by our side; itself: bucketed twice.")] = ALL_PAIRS,
    rounds: Annotated[int | None, typer.Option(help="Timed steps of each engine; more where steps are short.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[str | None, typer.Option(help="Of our engines: shared_memory, or gloo as torch's.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Instead: is the cause named that was put into a step?")] = False,
    same: Annotated[bool, typer.Option("--same", help="Instead: does `same` name what is wrong with scripts?")] = False,
) -> None:
    """Time our engines against torch's own on the same ranks, step by step in turn."""
    from shardlab.bench.against_torch import FULL_ROUNDS, PAIRS, QUICK_ROUNDS, WORKLOADS, BenchConfig, chosen
    from shardlab.bench.against_torch import bench as run_bench

    # Before measuring for minutes.
    if json is not None and (json.is_dir() or not os.access(json if json.exists() else json.parent, os.W_OK)):
        raise ValueError(f"json: {json} cannot be written; name a file in an existing directory")
    if why or same:
        flag = "why" if why else "same"
        refuse_others(context, (flag, "ranks", "json"), f"not beside --{flag}, which takes --ranks and --json")
        (_why if why else _same)(ranks, json)
        return
    config = BenchConfig(
        ranks=ranks, rounds=rounds if rounds is not None else QUICK_ROUNDS if quick else FULL_ROUNDS,
        workloads=chosen("workloads", names_in(workloads), WORKLOADS), pairs=chosen("pairs", names_in(pairs), PAIRS),
        device=device, transport=transport,
    )  # fmt: skip
    with progress_bar(config.num_rounds) as advance:
        rows = list(run_bench(config, on_progress=advance))
    console = Console(highlight=False)
    for workload in config.workloads:
        console.print(_table(workload, [row for row in rows if row.workload == workload.name]))
    console.print(NOTE, style="dim")
    if rows[0].transport == HostTransport.SHARED_MEMORY:
        console.print(SHARED_NOTE, style="dim")
    if json is not None:
        json.write_text(json_text.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _why(ranks: int, json: Path | None) -> None:
    """Print which cause is named for each that is put in, and whether the change that it names gains what it says."""
    import pandas as pd

    from shardlab.course.why_matrix import num_cells, verdict, why_matrix

    rows = []
    with progress_bar(num_cells((ranks,))) as advance:
        for row in why_matrix(ranks=(ranks,)):
            rows.append(row)
            advance(f"{row.injected} in {row.engine}")
    table = pd.DataFrame(map(asdict, rows))
    if json is not None:
        json.write_text(json_text.dumps(table.to_dict("records"), indent=2) + "\n")
    shown = table.assign(cell=table["named"].where(table["has_effect"], "no effect").where(~table["is_right"], "right"))
    shown = shown.pivot(index="injected", columns="engine", values="cell").reindex(table["injected"].unique())
    console = Console(highlight=False)
    title = f"The cause that is named, {count(ranks, 'rank')}"
    console.print(table_of(shown.fillna("").reset_index(names="put in"), title, 0))
    console.print(verdict(rows), soft_wrap=True)


def _same(ranks: int, json: Path | None) -> None:
    """Print what `same` says of broken scripts, and of right ones."""
    import pandas as pd

    from shardlab.course.same_matrix import cells, same_matrix, verdict

    rows = []
    with progress_bar(len(cells(ranks))) as advance:
        for row in same_matrix(ranks):
            rows.append(row)
            advance(f"{row.story}, {row.kind}")
    table = pd.DataFrame(map(asdict, rows))
    if json is not None:
        json.write_text(json_text.dumps(table.to_dict("records"), indent=2) + "\n")
    shown = table.assign(cell=table["word"].where(~table["is_right"], "right"))
    shown = shown.pivot(index="story", columns="kind", values="cell").reindex(table["story"].unique())
    console = Console(highlight=False)
    console.print(table_of(shown.fillna("").reset_index(names="script"), f"What is said, {count(ranks, 'rank')}", 0))
    console.print(verdict(rows), soft_wrap=True)


def _table(workload: "Workload", rows: Sequence["BenchRow"]) -> Table:
    import pandas as pd

    size = f"{workload.model}, {workload.rows} x {workload.seq_len} tokens a rank"
    title = f"{workload.name}: {size}, {count(rows[0].ranks, 'rank')}, {rows[0].rounds} rounds"
    quartiles = [f"{row.ratio_q1:.2f}-{row.ratio_q3:.2f}" for row in rows]
    shown = pd.DataFrame(map(asdict, rows)).assign(quartiles=quartiles)[list(COLUMNS)]
    shown[RATIOS] = shown[RATIOS].map("{:.2f}".format)
    # Narrow, as is all in it: it fits into 80 columns.
    return table_of(shown.rename(columns=COLUMNS), title, 0, right=[*COLUMNS.values()][2:])
