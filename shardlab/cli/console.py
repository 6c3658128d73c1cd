"""Shared by the commands: errors in one line, names in a list, tables, a progress bar, and numbers with their noun."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from math import floor, log10
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

BAD_INPUT = 2  # an exit code
UNITS = {"GB": 9, "MB": 6, "kB": 3}  # powers of ten


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """A ValueError inside is the user's to fix: one line, no traceback. Elsewhere it is a bug and stays one."""
    try:
        yield
    except ValueError as error:
        from shardlab.experiment import is_reporter

        if is_reporter():
            complain(str(error))
        raise typer.Exit(BAD_INPUT) from None


def complain(text: str) -> None:
    """One red line on stderr; nothing for an empty text."""
    if text:
        Console(stderr=True, highlight=False, soft_wrap=True).print("[bold red]error:[/]", Text(text))


def names_in(text: str) -> tuple[str, ...]:
    """The names in a comma-separated text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr while ranks work; calling what it yields advances it by one and says what was done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting the ranks", total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


def empty_table(title: str = "", left: Iterable[str] = (), right: Iterable[str] = (), **style: Any) -> Table:
    """A table without rows yet: its columns, first those of words, then those of numbers; no cell is broken."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, **{"pad_edge": False, **style})
    sides: dict[Literal["left", "right"], Iterable[str]] = {"left": left, "right": right}
    for side, names in sides.items():
        for name in names:
            table.add_column(name, justify=side, no_wrap=True)
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


def unit_of(largest_bytes: float) -> tuple[str, int]:
    """The largest unit in which the largest number is at least 1, and its power of ten; at least kB."""
    return next((item for item in UNITS.items() if largest_bytes >= 10 ** item[1]), ("kB", UNITS["kB"]))


def decimals_of(largest: float) -> int:
    """Number of decimals with which the largest value has five digits; small shards then still show some."""
    return min(6, max(1, 4 - floor(log10(largest)))) if largest else 1
