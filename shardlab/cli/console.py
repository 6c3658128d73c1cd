"""Shared by the commands: errors in one line, names in a list, tables, a progress bar, and numbers with their noun."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardlab import experiment

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
ROOMY = 100  # columns of a terminal in which a table gets wider gaps


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """A ValueError inside is the user's to fix: one line, no traceback. Elsewhere it is a bug and stays one."""
    try:
        yield
    except ValueError as error:
        if experiment.is_reporter():
            complain(str(error))
        raise typer.Exit(BAD_INPUT) from None


def complain(text: str) -> None:
    """One red line on stderr; nothing for an empty text."""
    if text:
        Console(stderr=True, highlight=False, soft_wrap=True).print("[bold red]error:[/]", Text(text))


def say(*parts: Any, **how: Any) -> None:
    """Print sentences and tables; ``how`` is that of rich, such as ``style`` and ``soft_wrap``."""
    Console(highlight=False).print(*parts, **how)


def say_json(found: Any) -> None:
    """Print what another program is to read."""
    typer.echo(json.dumps(found, indent=2))


def refuse_others(context: typer.Context, allowed: Collection[str], said: str) -> None:
    """Raise where options were given that are not ``allowed``; ``said`` is why not."""
    where = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in where.items() if source is not None and source.name == "COMMANDLINE"]
    if others := [name.replace("_", "-") for name in given if name not in allowed]:
        raise ValueError(f"{', '.join(others)}: {said}; leave {'it' if len(others) == 1 else 'them'} out")


def names_in(text: str) -> tuple[str, ...]:
    """The names in a comma-separated text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextlib.contextmanager
def progress_bar(
    total: int, *, first: str = "starting the ranks", quiet: bool = False, works_here: bool = False
) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that begins with ``first``; calling what it yields advances it by one and says what was done.

    Where this process itself ``works_here`` and lists its objects, no thread draws meanwhile: a tuple that is listed
    while another thread makes it raises there.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console, transient=True, auto_refresh=not works_here) as progress:
        task = progress.add_task(first, total=total)
        progress.refresh()
        yield lambda done: progress.update(task, advance=1, description=done, refresh=True)


def table_of(shown: pd.DataFrame, title: str, gap: int | None = None, right: Collection[str] = ()) -> Table:
    """A table; numbers and the columns ``right`` are aligned right, ``gap`` more than one space between columns.

    By default as many as the terminal has room for.
    """
    from shardlab.plots.text import column_text

    if gap is None:
        gap = 2 if Console().width >= ROOMY else 0
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False,
        pad_edge=False, padding=(0, gap, 0, 0),
    )  # fmt: skip
    for name in shown.columns:
        numeric = name in right or pd.api.types.is_numeric_dtype(shown[name])
        head = str(name).replace(" (", "\n").rstrip(")")  # the unit has a line of its own
        # Where the terminal is too narrow, a name goes on in the next line; half a number says nothing.
        table.add_column(head, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in zip(*(column_text(shown[name]) for name in shown.columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def answer_table(lines: Iterable[tuple[str, str]]) -> Table:
    """Lines of an answer, (title, text), before whatever supports them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for title, text in lines:
        table.add_row(title, Text(text))
    return table


def count(number: int, noun: str) -> str:
    """For example '1 rank' or '4 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_units(
    rows: pd.DataFrame, sizes: dict[str, str], others: dict[str, str], *, add_up: bool = False
) -> pd.DataFrame:
    """The first column, bytes in units and other numbers, without columns that say nothing.

    Args:
        rows: columns of bytes and others.
        sizes: names of bytes, by column.
        others: names of other columns.
        add_up: all bytes in the unit of the largest; else each column in its own.
    """
    from shardlab.plots.text import byte_scale

    sizes = {name: shown for name, shown in sizes.items() if name in rows and rows[name].fillna(0).any()}
    largest, readable = rows[list(sizes)].astype(float).abs().max(), rows.iloc[:, :1].copy()
    for name, shown in sizes.items():
        divisor, unit = byte_scale(float(largest.max() if add_up else largest[name]))
        readable[f"{shown} ({unit}{'/step' if shown == 'sent' else ''})"] = rows[name].astype("Float64") / divisor
    for name, shown in others.items():
        if name in rows and rows[name].notna().any():
            readable[shown] = rows[name]
    return readable
