"""Shared by the commands: errors in one line, and numbers with their noun."""

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.text import Text

BAD_INPUT = 2  # an exit code


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


def count(number: int, noun: str) -> str:
    """For example '1 rank' or '4 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
