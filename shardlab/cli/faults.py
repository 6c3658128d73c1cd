"""``shardlab faults``: break every strategy in every way, and see what the user is told."""

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import count, names_in, progress_bar

if TYPE_CHECKING:
    from shardlab.faults.matrix import MatrixConfig, Row

NOTE = (
    "right: the run ended with the losses of a run without the fault. Otherwise letters say what the message names: R "
    "the rank at fault, C a collective, L a line of the program; then the seconds from the fault to the message (none "
    "if it comes at the end of the run). (!): something is left behind, or the pool is not usable."
)


def faults(
    quick: Annotated[bool, typer.Option("--quick", help="Faults in the backward alone.")] = False,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, torch_ddp, torch_zero1, torch_fsdp2 too; by default ours, with --quick two of them.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks, at least 3.")] = 3,
    transport: Annotated[
        str | None, typer.Option(help="shared_memory or gloo; by default the first that works.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    timeout_s: Annotated[
        float, typer.Option(help="Seconds in one collective until a hang is told; give more on a busy machine.")
    ] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> int:
    """Break training on purpose, in every way under every strategy: what is the user told, and what is left behind?"""
    from shardlab.faults.matrix import QUICK_STRATEGIES, STRATEGIES, MatrixConfig

    names = names_in(strategies) if strategies is not None else QUICK_STRATEGIES if quick else STRATEGIES
    config = MatrixConfig(
        strategies=names, ranks=ranks, transport=transport, quick=quick, device=device, timeout_s=timeout_s
    )
    rows = _with_progress(config)
    if json:
        typer.echo(json_text.dumps([asdict(row) for row in rows], indent=2))
    else:
        console = Console(highlight=False)
        console.print(_matrix(rows))
        console.print()
        console.print(_sentences(rows))
        console.print()
        console.print(NOTE, style="dim")
        console.print(_verdict(rows))
    return 0 if all(row.is_good for row in rows) else 1


def _with_progress(config: "MatrixConfig") -> list["Row"]:
    from shardlab.faults.matrix import matrix

    with progress_bar(len(config.cases)) as advance:
        return matrix(config, on_row=lambda row: advance(f"{row.strategy}: {row.fault}"))


def _matrix(rows: Sequence["Row"]) -> Table:
    from shardlab.faults.kinds import PHASES

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    for name in ("fault", "phase", "rank", *strategies):
        table.add_column(name, no_wrap=True)
    cells = {(row.fault, row.phase, row.rank, row.strategy): _cell(row) for row in rows}
    faults = list(dict.fromkeys(row.fault for row in rows))
    # Not as they come: only some strategies have collectives in the forward.
    order = sorted({key[:3] for key in cells}, key=lambda key: (faults.index(key[0]), PHASES.index(key[1]), -key[2]))
    for fault, phase, rank in order:
        of_strategies = (cells.get((fault, phase, rank, strategy), "-") for strategy in strategies)
        table.add_row(fault, phase, str(rank), *of_strategies)
    return table


def _cell(row: "Row") -> str:
    from shardlab.faults.matrix import Outcome

    if row.outcome in (Outcome.RIGHT, Outcome.SILENT):
        said = str(row.outcome)
    else:
        named = {"R": row.outcome == Outcome.NAMED, "C": row.names_collective, "L": row.names_line}
        said = "".join(letter for letter, is_named in named.items() if is_named) or "told"
        said += "" if row.told_s is None else f" {row.told_s:.1f} s"
    return said if row.usable and not row.left else f"{said} (!)"


def _sentences(rows: Sequence["Row"]) -> Table:
    """What is told of each fault, under the first strategy."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("fault", no_wrap=True)
    table.add_column("what is told")
    first = {row.fault: row for row in reversed(rows) if row.said}
    for fault in dict.fromkeys(row.fault for row in rows):
        if fault in first:
            error = f"{first[fault].error}: " if first[fault].error else ""
            table.add_row(fault, Text(error + first[fault].said.partition("\n")[0]))
    return table


def _verdict(rows: Sequence["Row"]) -> str:
    good = sum(row.is_good for row in rows)
    said = f"In {good} of {count(len(rows), 'case')} the run was right or the user was told, and nothing was left."
    for row in rows:
        if not row.is_good:
            what = "the pool does not train as before" if not row.usable else row.left or row.outcome
            said += f"\n{row.strategy}, {row.fault} on rank {row.rank} in the {row.phase}: {what}"
    return said
