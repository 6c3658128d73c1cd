"""``shardlab exercises``: list them, or mark a class."""

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import count

if TYPE_CHECKING:
    from shardlab.exercises import Exercise
    from shardlab.exercises.grade import Mark


def exercises(
    grade: Annotated[
        Path | None, typer.Option(help="Mark this folder: a .py file or a folder for each student.", show_default=False)
    ] = None,
    extra: Annotated[
        Path | None, typer.Option("--with", help="A .py file with exercises of your own.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """List the exercises, or mark the solutions of a class."""
    from shardlab.exercises import LADDER
    from shardlab.exercises.grade import exercises_in

    known = [*LADDER, *(exercises_in(extra) if extra is not None else [])]
    rows = _listed(known) if grade is None else _marked(grade, known)
    if json:
        typer.echo(json_text.dumps(rows, indent=2))
    elif grade is None:
        _print([_short(row) for row in rows])
        typer.echo(
            f"Write each as a function: {rows[0]['name']} as {rows[0]['function']}.\n"
            "Every exercise is checked with right solutions, which must pass, and wrong ones, which must not."
        )
    else:
        _print(rows)


def _listed(exercises: "list[Exercise]") -> list[dict[str, Any]]:
    return [
        {
            "name": exercise.name, "notebook": exercise.notebook, "function": exercise.function_name,
            "references": exercise.num_references, "wrong_solutions": exercise.num_wrong,
        }
        for exercise in exercises
    ]  # fmt: skip


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Fits into 80 columns."""
    return {
        "name": row["name"], "notebook": row["notebook"],
        "right": row["references"], "wrong": row["wrong_solutions"],
    }  # fmt: skip


def _marked(folder: Path, exercises: "list[Exercise]") -> list[dict[str, Any]]:
    from shardlab.exercises.grade import grade, output_aside

    with output_aside():
        marks: list[Mark] = list(grade(folder, exercises))
    rows = [asdict(mark) for mark in marks]
    return [row | {"verdict": str(row["verdict"])} for row in rows]


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name.replace("num_", "").replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    console = Console(highlight=False)
    console.print(table)
    if "verdict" in rows[0]:
        passed = sum(row["verdict"] == "passed" for row in rows)
        console.print(f"{passed} of {count(len(rows), 'solution')} passed.")
