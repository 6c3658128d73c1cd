"""``shardlab plan``: memory of the model states from a number of parameters, before anything is run."""

import json as json_text
from dataclasses import asdict
from math import floor, log10
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from shardlab.planner.model_states import ModelStates, model_states
from shardlab.planner.precision import precision_named


def plan(
    params: Annotated[float, typer.Option(help="Parameters of the model, for example 7.5e9.")],
    ranks: Annotated[int, typer.Option(help="Ranks that share it.")],
    precision: Annotated[str, typer.Option(help="mixed (16 bit, fp32 master weights) or fp32.")] = "mixed",
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Say what parameters, gradients and Adam's state take per rank under ddp, zero1, zero2 and zero3."""
    rows = model_states(params, ranks, precision)
    if json:
        typer.echo(json_text.dumps([asdict(row) for row in rows], indent=2))
        return
    console = Console(highlight=False)
    console.print(_table(rows, f"{params:,.0f} parameters, {ranks} ranks, {precision} precision, Adam"))
    console.print(_note(precision))


def _table(rows: tuple[ModelStates, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for name in ("parameters\nGB", "gradients\nGB", "optimizer\nGB", "total\nGB", "saving", "sent\n10^9"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = rows[0].total_bytes
    decimals = _decimals(whole / 1e9)
    for row in rows:
        held = (row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.total_bytes)
        saving = f"{100 * (1 - row.total_bytes / whole):.1f} %"
        in_billions = [f"{value / 1e9:,.{decimals}f}" for value in (*held, row.wire_elements)]
        table.add_row(row.strategy, *in_billions[:-1], saving, in_billions[-1])
    return table


def _decimals(largest: float) -> int:
    """Decimals that give the largest value five digits, so that what is sharded still shows some."""
    return min(6, max(1, 4 - floor(log10(largest))))


def _note(precision: str) -> str:
    each = precision_named(precision)
    return (
        "Per rank, in GB of 10^9 bytes; saving against ddp; sent: elements per step. Bytes of a parameter "
        f"{each.parameter}, of a gradient {each.gradient}, of its optimizer state {each.optimizer}. Activations, "
        "temporaries and padding come on top. Formulas: ZeRO, arXiv 1910.02054, sections 5 and 7."
    )
