"""``shardlab plan``: what strategies cost, without running: of a number of parameters, or of a workload."""

import json as json_text
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shardlab.cli.console import answer_table, count, decimals_of, empty_table, names_in, unit_of
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.planner.fit import CARDS, Gpu
from shardlab.planner.formulas import ModelStates, model_states, precision_named

if TYPE_CHECKING:
    import pandas as pd

FACTORS = {"K": 3, "M": 6, "B": 9, "T": 12}  # powers of ten
BUCKET_MIB = DEFAULT_BUCKET_BYTES / 2**20
A_LINK = "24GB,32GB/s,10us; says what is left."


def plan(
    ranks: Annotated[int, typer.Option(help="Number of ranks; by default that of --tp.", show_default=False)] = 0,
    params: Annotated[str, typer.Option(help="Parameters of the model, for example 7.5B, 350M or 7.5e9.")] = "",
    workload: Annotated[str, typer.Option(help="Instead: FILE.py:NAME or PACKAGE.MODULE:NAME.")] = "",
    precision: Annotated[str, typer.Option(help="Of --params: mixed or fp32; of --workload: as in compare.")] = "",
    strategies: Annotated[str, typer.Option(help="Of --workload: comma-separated; by default all of ours.")] = "",
    tp: Annotated[int, typer.Option(help="Of --workload: tensor-parallel ranks; shows how layers are divided.")] = 1,
    sharding: Annotated[str, typer.Option(help="Of --workload: FSDP's, as in compare.")] = "full_shard",
    wrap: Annotated[str, typer.Option(help="Of --workload: FSDP's units, as in compare.")] = "",
    bucket_mib: Annotated[float, typer.Option(help="Of --workload: capacity of a bucket; compare has 1.")] = BUCKET_MIB,
    gpu: Annotated[str, typer.Option(help="A card (h100, 4090), its memory (24GB), or with a link: " + A_LINK)] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Predict bytes per rank, and what is sent, without running; nothing is trained and no rank starts."""
    if bool(params) == bool(workload):
        raise ValueError("params, workload: give one of them: --params 7.5B, or --workload train.py:workload")
    ranks = ranks or (tp if tp > 1 else 0)
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} was given; give 1 or more, for example --ranks 8")
    gpu = CARDS.get(gpu.strip().lower(), gpu)
    on = Gpu.parse(gpu) if gpu else None  # before the work: it may be misspelled
    if workload:
        chosen: dict[str, Any] = {"sharding": sharding, "precision": precision or "full", "tp": tp}
        chosen |= ({"wrap": wrap} if wrap else {}) | ({"bucket_mib": bucket_mib} if bucket_mib != BUCKET_MIB else {})
        _plan_workload(workload, ranks, strategies, chosen, gpu, json)
        return
    of_workload = {
        "strategies": strategies, "tp": tp != 1, "sharding": sharding != "full_shard", "wrap": wrap,
        "bucket_mib": bucket_mib != BUCKET_MIB,
    }  # fmt: skip
    if given := [name for name, is_given in of_workload.items() if is_given]:
        raise ValueError(
            f"{', '.join(given)}: only for --workload; with --params leave {'it' if len(given) == 1 else 'them'} out"
        )
    _plan_params(params, ranks, precision or "mixed", on, json)


def _plan_params(params: str, ranks: int, precision: str, gpu: Gpu | None, json: bool) -> None:
    number = _number_of_params(params)
    rows = model_states(number, ranks, precision)
    if json:
        left = [{} if gpu is None else {"left_bytes": gpu.memory_bytes - row.total_bytes} for row in rows]
        typer.echo(json_text.dumps([asdict(row) | more for row, more in zip(rows, left, strict=True)], indent=2))
        return
    console = Console(highlight=False)
    if gpu is not None:
        _print_fit(
            [{"strategy": row.strategy, "left_bytes": gpu.memory_bytes - row.total_bytes, "sent": row.wire_elements}
             for row in rows], gpu, ranks,
        )  # fmt: skip
    console.print(_table(rows, f"{number:,.0f} parameters, {count(ranks, 'rank')}, {precision} precision, Adam", gpu))
    console.print(_note(precision, rows[0], gpu))


def _plan_workload(place: str, ranks: int, strategies: str, options: dict[str, Any], gpu: str, json: bool) -> None:
    from shardlab.experiment import plan as planned  # here, because it imports torch
    from shardlab.experiment.named_workload import workload_at
    from shardlab.experiment.tensor import shown_plan
    from shardlab.lab.fit import RunPlan
    from shardlab.planner.setup import STRATEGIES

    names = names_in(strategies)
    workload, layers = workload_at(place), None
    if options["tp"] > 1:
        workload, layers = shown_plan(workload, options["tp"])
    names = names or STRATEGIES
    rows = RunPlan.of(workload, ranks, names, **options).on(gpu) if gpu else planned(workload, ranks, names, **options)
    if json:
        found = json_text.loads(rows.to_json(orient="records"))
        if layers is not None:
            found = {"modules": json_text.loads(layers.to_json(orient="records")), "strategies": found}
        typer.echo(json_text.dumps(found, indent=2))
        return
    console = Console(highlight=False)
    if gpu:
        _print_fit(rows.rename(columns={"wire_bytes_per_step": "sent"}), Gpu.parse(gpu), ranks)
    if layers is not None:
        table = empty_table(f"{place}, layers over {options['tp']} ranks", left=("module", "style"))
        table.add_column("why")
        for _, row in layers.iterrows():
            table.add_row(row["module"], row["style"], row["why"])
        console.print(table)
    console.print(_table_of(rows, f"{place}, {count(ranks, 'rank')}"))
    by_rows = ", ".join(rows.loc[rows["messages_per_step"].isna(), "strategy"])
    why_not_told = f" What {by_rows} sends depends on the rows." if by_rows else ""
    console.print(
        "Per rank, the largest of all ranks; at rest, between two steps. Sent: bytes and messages of one step. Units "
        "are decimal: 1 MB is 1,000,000 bytes. "
        f"Activations and temporaries come on top.{_buckets(names, options)}{why_not_told}"
        f"{' * takes no precision, and keeps the dtype of the model.' if 'precision' in rows else ''}"
    )
    if gpu:
        about_rows = "Rows: of a micro-batch, by what autograd keeps for each"
        if rows["rows_that_fit"].isna().any():
            about_rows = "What a row keeps is not known where layers are divided, or depend on values"
        console.print(_table_on(rows, f"on a GPU of {gpu}"))
        console.print(
            f"Left: memory without what is at rest and what is gathered at once. {about_rows}; libraries and "
            f"the allocator take some too.{' Sending: all messages, one by one.' if rows['sending_ms'].any() else ''}"
        )


def _print_fit(rows: Any, gpu: Gpu, ranks: int) -> None:
    """The line that answers before the tables support it."""
    import pandas as pd

    from shardlab.experiment.answer import what_fits

    said = what_fits(pd.DataFrame(rows), gpu.memory_bytes, ranks)
    Console(highlight=False).print(answer_table([("WHAT FITS", said)]))


def _buckets(names: tuple[str, ...], options: dict[str, Any]) -> str:
    """How large the buckets are, which decides the number of messages; empty without any."""
    from shardlab.experiment.config import takes

    size = options.get("bucket_mib", BUCKET_MIB)
    return f" Buckets of {size:g} MiB." if any(map(takes("bucket_bytes"), names)) else ""


def _table_of(rows: "pd.DataFrame", title: str) -> Table:
    """In the unit of the largest number; without a column that is zero everywhere."""
    names = {
        "parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer",
        "offloaded_bytes": "host", "rest_bytes": "at rest", "wire_bytes_per_step": "sent",
    }  # fmt: skip
    shown = [name for name in names if rows[name].fillna(0).any()]
    largest = float(rows[shown].max().max())
    unit, exponent = unit_of(largest)
    one, decimals = 10**exponent, decimals_of(largest / 10**exponent)
    per, rows = {"wire_bytes_per_step": "/step"}, rows.astype({"messages_per_step": float})
    scaled = (f"{names[name]}\n{unit}{per.get(name, '')}" for name in shown)
    table = empty_table(title, left=("strategy",), right=(*scaled, "messages\n/step"))
    for _, row in rows.iterrows():
        mark = " *" if row.get("precision") == "full" else ""
        numbers = (_number(row[name] / one, decimals) for name in shown)
        table.add_row(row["strategy"] + mark, *numbers, _number(row["messages_per_step"]))
    return table


def _number(value: float, decimals: int = 0) -> str:
    """With its thousands apart; a word where it is missing."""
    return "by rows" if isnan(value) else f"{value:,.{decimals}f}"


def _table_on(rows: "pd.DataFrame", title: str) -> Table:
    """What is left of a GPU's memory."""
    columns = {
        "gathered_bytes": ("gathered\nMB", _megabytes), "left_bytes": ("left\nMB", _megabytes),
        "row_bytes": ("a row keeps\nMB", _megabytes), "rows_that_fit": ("rows\nthat fit", "{:,.0f}".format),
        "sending_ms": ("sending\nms/step", "{:,.2f}".format),
    }  # fmt: skip
    shown = {name: column for name, column in columns.items() if rows[name].notna().any()}
    table = empty_table(title, left=("strategy",), right=(name for name, _ in shown.values()))
    rows = rows.astype(dict.fromkeys(shown, float))
    for _, row in rows.iterrows():
        words = ["-" if isnan(row[name]) else written(row[name]) for name, (_, written) in shown.items()]
        table.add_row(row["strategy"], *words)
    return table


def _megabytes(num_bytes: float) -> str:
    size = num_bytes / 1e6
    return f"{size:,.2f}" if abs(size) >= 1 else f"{size:.3g}"


def _number_of_params(text: str) -> float:
    """The number of parameters, from a text such as 7.5B.

    Raises:
        ValueError: it is not a number.
    """
    factor = FACTORS.get(text[-1:].upper())
    try:
        # As a decimal, because 1.1 * 10**9 is not a whole number in binary floating point.
        return float(Decimal(text) if factor is None else Decimal(text[:-1]).scaleb(factor))
    except InvalidOperation:
        raise ValueError(f"params: {text!r} is not a number, optionally followed by {', '.join(FACTORS)}") from None


def _table(rows: tuple[ModelStates, ...], title: str, gpu: Gpu | None) -> Table:
    unit, exponent = unit_of(rows[0].total_bytes)
    held = (f"{name}\n{unit}" for name in ("parameters", "gradients", "optimizer", "total"))
    last = "saving" if gpu is None else f"left\n{unit}"
    table = empty_table(title, left=("strategy",), right=(*held, last, f"sent\n10^{exponent}"))
    whole, one = rows[0].total_bytes, 10**exponent
    decimals = decimals_of(whole / one)
    for row in rows:
        left = 0.0 if gpu is None else gpu.memory_bytes - row.total_bytes
        sizes = (row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.total_bytes, left, row.wire_elements)
        *scaled, last, sent = [f"{value / one:,.{decimals}f}" for value in sizes]
        saving = f"{100 * (1 - row.total_bytes / whole):.1f} %"
        table.add_row(row.strategy, *scaled, saving if gpu is None else last, sent)
    return table


def _note(precision: str, largest: ModelStates, gpu: Gpu | None) -> str:
    each = precision_named(precision)
    unit, power = unit_of(largest.total_bytes)
    words = "saving against ddp" if gpu is None else "left: memory of the GPU without the total"
    return (
        f"Per rank, in {unit} of 10^{power} bytes; {words}; sent: elements per step. FSDP's full_shard takes what "
        f"zero3 takes. Bytes of a parameter {each.parameter}, of a gradient {each.gradient}, of its optimizer state "
        f"{each.optimizer}. Activations, temporaries and padding come on top. Formulas: ZeRO, arXiv 1910.02054, "
        "sections 5 and 7."
    )
