"""``shardlab exercises``: list them, or mark a class."""

import json as json_text
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardlab.cli.console import count, table_of

if TYPE_CHECKING:
    from shardlab.course import Exercise
    from shardlab.course.exercises.grade import Mark


def exercises(
    grade: Annotated[Path | None, typer.Option(help="Mark this folder: a .py file or folder for each student.")] = None,
    extra: Annotated[Path | None, typer.Option("--with", help="A .py file with exercises of your own.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """List the exercises, or mark the solutions of a class."""
    from shardlab.course import LADDER
    from shardlab.course.exercises.grade import exercises_in

    known = [*LADDER, *(exercises_in(extra) if extra is not None else [])]
    rows = _listed(known) if grade is None else _marked(grade, known)
    if json:
        typer.echo(json_text.dumps(rows, indent=2))
    elif grade is None:
        short = {"name": "name", "notebook": "notebook", "right": "references", "wrong": "wrong_solutions"}
        _print([{name: row[key] for name, key in short.items()} for row in rows])  # fits into 80 columns
        typer.echo(
            f"Write each as a function: {rows[0]['name']} as {rows[0]['function']}.\n"
            "Every exercise is checked with right solutions, which must pass, and wrong ones, which must not."
        )
    else:
        _print_marks(rows)


def _listed(exercises: "list[Exercise]") -> list[dict[str, Any]]:
    return [
        {
            "name": exercise.name, "notebook": exercise.notebook, "function": exercise.function_name,
            "references": exercise.num_references, "wrong_solutions": exercise.num_wrong,
        }
        for exercise in exercises
    ]  # fmt: skip


def _marked(folder: Path, exercises: "list[Exercise]") -> list[dict[str, Any]]:
    from shardlab.course.exercises.grade import grade

    # What submissions print goes to stderr, so that marks on stdout stay readable for machines.
    with redirect_stdout(sys.stderr):
        marks: list[Mark] = list(grade(folder, exercises))
    rows = [asdict(mark) for mark in marks]
    return [row | {"verdict": str(row["verdict"])} for row in rows]


def _print_marks(rows: list[dict[str, Any]]) -> None:
    """A row for each student, then what was handed in and has not passed."""
    of_students: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_students.setdefault(row["student"], []).append(row)
    sums = [_summed(student, marks) for student, marks in of_students.items()]
    # Without what is zero for all: nothing may be blocked, or no exercise count bytes.
    shown = [name for name in sums[0] if name in ("student", "passed") or any(row[name] for row in sums)]
    _print([{name: row[name] for name in shown} for row in sums])
    if failed := [row for marks in of_students.values() for row in _failed(marks)]:
        Console().print()
        _print(failed)
    passed, handed_in = (sum(row[name] for row in sums) for name in ("passed", "handed in"))
    Console(highlight=False).print(f"\n{passed} of {count(handed_in, 'solution')} passed.")


def _summed(student: str, marks: list[dict[str, Any]]) -> dict[str, Any]:
    """How many verdicts of each kind, and the score of what has passed: sums, but the peak is the highest."""
    handed_in = [row for row in marks if row["handed_in"]]
    verdicts = [row["verdict"] for row in handed_in]
    return {
        "student": student, "handed in": len(handed_in), "passed": verdicts.count("passed"),
        "failed": verdicts.count("failed"), "blocked": verdicts.count("blocked"),
        "messages": sum(row["messages"] for row in marks), "bytes": sum(row["num_bytes"] for row in marks),
        "peak bytes": max(row["peak_bytes"] for row in marks), "time us": sum(row["time_us"] for row in marks),
    }  # fmt: skip


def _failed(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files that do not import, once for all exercises that are not handed in, and what was handed in for nothing."""
    keys = ("student", "exercise", "reason")
    missing = next((row for row in marks if not row["handed_in"]), None)
    # The last part of the reason is that there is no function, which the counts say.
    trouble = "" if missing is None else missing["reason"].rpartition("; ")[0]
    files = [{"student": marks[0]["student"], "exercise": "-", "reason": trouble}] if trouble else []
    rest = [row for row in marks if row["handed_in"] and row["verdict"] != "passed"]
    return [*files, *({key: row[key] for key in keys} for row in rest)]


def _print(rows: list[dict[str, Any]]) -> None:
    import pandas as pd

    Console(highlight=False).print(table_of(pd.DataFrame(rows), "", 1))
