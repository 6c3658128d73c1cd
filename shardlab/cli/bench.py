"""``shardlab bench``: our engines against torch's own, on this machine."""

import json as json_text
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from shardlab.cli.console import INTERRUPTED, count, names_in, progress_bar, refuse_others, say, table_of
from shardlab.vocabulary import HostTransport

if TYPE_CHECKING:
    from shardlab.bench.against_torch import BenchRow
    from shardlab.bench.turns import Workload

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
    total = len(config.workloads) * len(config.pairs)
    with progress_bar(config.num_rounds) as advance:
        rows = _kept(run_bench(config, on_progress=advance), total)
    _write(rows, json)
    for workload in config.workloads:
        if own := [row for row in rows if row.workload == workload.name]:
            say(_table(workload, own))
    say(NOTE, style="dim")
    if rows[0].transport == HostTransport.SHARED_MEMORY:
        say(SHARED_NOTE, style="dim")
    _check_all(rows, total)


def _why(ranks: int, json: Path | None) -> None:
    """Print which cause is named for each that is put in, and whether the change that it names gains what it says."""
    from shardlab.course.why_matrix import num_cells, verdict, why_matrix

    total = num_cells()
    rows = _measured(why_matrix(ranks), total, lambda row: f"{row.injected} in {row.engine}", json)
    words = ["right" if row.is_right else row.named if row.has_effect else "no effect" for row in rows]
    cells = [(row.injected, row.engine, word) for row, word in zip(rows, words, strict=True)]
    _print_cells(cells, "put in", f"The cause that is named, {count(ranks, 'rank')}", verdict(rows))
    _check_all(rows, total)


def _same(ranks: int, json: Path | None) -> None:
    """Print what `same` says of broken scripts, and of right ones."""
    from shardlab.course.same_scripts import cells, same_matrix, verdict

    total = len(cells(ranks))
    rows = _measured(same_matrix(ranks), total, lambda row: f"{row.story}, {row.kind}", json)
    found = [(row.story, row.kind, "right" if row.is_right else row.word) for row in rows]
    _print_cells(found, "script", f"What is said, {count(ranks, 'rank')}", verdict(rows))
    _check_all(rows, total)


def _measured(rows: Iterable[Any], total: int, name: Callable[[Any], str], json: Path | None) -> list[Any]:
    """The rows as they come, beside a bar that names each; also in a file, if one is given."""
    with progress_bar(total) as advance:
        found = _kept(rows, total, lambda row: advance(name(row)))
    _write(found, json)
    return found


def _kept(rows: Iterable[Any], total: int, told: Callable[[Any], object] = id) -> list[Any]:
    """The rows as they come, each of them ``told``; those before Ctrl-C, which is raised only if there is none."""
    found: list[Any] = []
    try:
        for row in rows:
            found.append(row)
            told(row)
    except KeyboardInterrupt:
        if not found:
            raise
        Console(stderr=True).print(f"interrupted: {len(found)} of {total} rows were measured, which follow")
    return found


def _check_all(rows: Sequence[Any], total: int) -> None:
    if len(rows) < total:
        raise typer.Exit(INTERRUPTED)


def _write(rows: Iterable[Any], json: Path | None) -> None:
    if json is not None:
        json.write_text(json_text.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _print_cells(cells: Sequence[tuple[str, str, str]], rows: str, title: str, said: str) -> None:
    """A table of (row, column, word), in the order in which rows first come, and a sentence below."""
    table = pd.DataFrame(cells, columns=[rows, "column", "word"])
    shown = table.pivot(index=rows, columns="column", values="word").reindex(table[rows].unique())
    say(table_of(shown.fillna("").reset_index(), title, 0))
    say(said, soft_wrap=True)


def _table(workload: "Workload", rows: Sequence["BenchRow"]) -> Table:
    size = f"{workload.model}, {workload.rows} x {workload.seq_len} tokens a rank"
    title = f"{workload.name}: {size}, {count(rows[0].ranks, 'rank')}, {rows[0].rounds} rounds"
    quartiles = [f"{row.ratio_q1:.2f}-{row.ratio_q3:.2f}" for row in rows]
    shown = pd.DataFrame(map(asdict, rows)).assign(quartiles=quartiles)[list(COLUMNS)]
    shown[RATIOS] = shown[RATIOS].map("{:.2f}".format)
    # Narrow, as is all in it: it fits into 80 columns.
    return table_of(shown.rename(columns=COLUMNS), title, 0, right=[*COLUMNS.values()][2:])
