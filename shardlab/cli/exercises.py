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
    import pandas as pd

    from shardlab.course import Exercise
    from shardlab.course.exercises.grade import Mark

SCORES = {  # of a mark, as a table has it, and what it is of several
    "handed_in": ("handed in", "sum"), "messages": ("messages", "sum"), "num_bytes": ("bytes", "sum"),
    "peak_bytes": ("peak bytes", "max"), "time_us": ("time us", "sum"),
}  # fmt: skip


def exercises(
    grade: Annotated[Path | None, typer.Option(help="Mark this folder: a .py file or folder for each student.")] = None,
    extra: Annotated[Path | None, typer.Option("--with", help="A .py file with exercises of your own.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """List the exercises, or mark the solutions of a class."""
    import pandas as pd

    from shardlab.course import LADDER
    from shardlab.course.exercises.grade import exercises_in

    known = [*LADDER, *(exercises_in(extra) if extra is not None else [])]
    rows = _listed(known) if grade is None else _marked(grade, known)
    if json:
        typer.echo(json_text.dumps(rows, indent=2))
    elif grade is None:
        names = {"references": "right", "wrong_solutions": "wrong"}  # so that it fits into 80 columns
        _print(pd.DataFrame(rows).drop(columns="function").rename(columns=names))
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
    import pandas as pd

    marks = pd.DataFrame(rows).rename(columns={name: shown for name, (shown, _) in SCORES.items()})
    given = marks["handed in"]
    verdicts = {name: (marks["verdict"] == name) & given for name in ("passed", "failed", "blocked")}
    how = {"handed in": "sum", **dict.fromkeys(verdicts, "sum")} | dict(SCORES.values())
    sums = marks.assign(**verdicts).groupby("student").agg(how).reset_index()
    # Without what is zero for all: nothing may be blocked, or no exercise count bytes.
    _print(sums.loc[:, [name in ("student", "passed") or bool(sums[name].any()) for name in sums]])
    # Files that do not import, once for all that is not handed in: the last part of its reason says that it is not.
    missing = marks[~given].drop_duplicates("student")
    files = missing.assign(exercise="-", reason=missing["reason"].str.rpartition("; ")[0])
    failed = pd.concat([files[files["reason"] != ""], marks[given & ~verdicts["passed"]]])
    if len(failed):
        Console().print()
        _print(failed.sort_values("student", kind="stable")[["student", "exercise", "reason"]])
    passed, handed_in = int(sums["passed"].sum()), int(sums["handed in"].sum())
    Console(highlight=False).print(f"\n{passed} of {count(handed_in, 'solution')} passed.")


def _print(table: "pd.DataFrame") -> None:
    Console(highlight=False).print(table_of(table, "", 1))
