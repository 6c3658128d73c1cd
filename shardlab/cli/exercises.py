"""``shardlab exercises``: list them, print them for a class, or mark one."""

import os
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from shardlab import course
from shardlab.cli.console import count, progress_bar, say, say_json, table_of

SIGNS = {"passed": "+", "failed": "x", "blocked": "?"}  # in the grid; nothing for what was not handed in


def exercises(
    names: Annotated[list[str] | None, typer.Argument(help="Of exercises, as zero1.owners; none for all.")] = None,
    grade: Annotated[
        Path | None, typer.Option(help="Mark a folder in which each student has a .py file, a notebook or a folder.")
    ] = None,
    extra: Annotated[Path | None, typer.Option("--with", help="A .py file with exercises of your own.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print points as CSV, a row a student; why on stderr.")] = False,
    sheet: Annotated[bool, typer.Option("--sheet", help="Print tasks and starters as Markdown.")] = False,
    solutions: Annotated[bool, typer.Option("--solutions", help="Print right answers, and why they are.")] = False,
) -> None:
    """List the exercises, print a sheet or its solutions, or mark the solutions of a class."""
    from shardlab.course.exercises.grade import exercises_in

    if sheet + solutions + (grade is not None) > 1:
        raise ValueError("sheet, solutions, grade: each prints something else; give one of them")
    if (csv and grade is None) or json + csv + sheet + solutions > 1:
        raise ValueError("json, csv: rows of the list or of marks; give one of them, csv with --grade FOLDER alone")
    known = [*course.LADDER, *(exercises_in(extra) if extra is not None else [])]
    own = {exercise.name: exercise for exercise in known}
    known = [own[name] if name in own else course.find(name) for name in names] if names else known
    if sheet or solutions:
        one = known[0]
        last = f'Check an answer in a notebook: `shardlab.course.check("{one.name}", {one.function_name})`.'
        typer.echo("\n\n".join(map(_on_solution, known) if solutions else [*map(_on_sheet, known), last]))
        return
    if grade is None:
        _print_list(known, json)
        return
    rows = _marked(grade, known)
    if json:
        say_json(rows)
    elif csv:
        typer.echo(_points(rows).reset_index().to_csv(index=False), nl=False)
        _print_why(rows, Console(highlight=False, stderr=True))
    else:
        _print_marks(rows)


def _print_list(exercises: "list[course.Exercise]", json: bool) -> None:
    rows = [
        {"name": exercise.name, "notebook": exercise.notebook, "function": exercise.function_name}
        for exercise in exercises
    ]
    if json:
        say_json(rows)
        return
    say(table_of(pd.DataFrame(rows).drop(columns="function"), "", 1))
    typer.echo(
        f"Write each as a function: {rows[0]['name']} as {rows[0]['function']}; --sheet prints what is asked, "
        "and --grade FOLDER says what is wrong with the answers in a folder.\n"
        "Every exercise is checked with right solutions, which must pass, and wrong ones, which must not."
    )


def _on_sheet(exercise: "course.Exercise") -> str:
    points = count(exercise.points, "point")
    return f"## {exercise.name} ({points})\n\n{exercise.task}\n\n```python\n{exercise.starter.rstrip()}\n```"


def _on_solution(exercise: "course.Exercise") -> str:
    from shardlab.course.exercises.ladder import solution_of

    known = solution_of(exercise) or "No solution is printed: its exercise comes from a file of your own."
    return f"## {exercise.name}\n\n{known}"


def _marked(folder: Path, exercises: "list[course.Exercise]") -> list[dict[str, Any]]:
    from shardlab.course.exercises.grade import grade, submissions

    rows, total = [], len(submissions(folder)) * len(exercises)
    # What submissions print is no mark, and may be a million lines.
    with progress_bar(total) as advance, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        for mark in grade(folder, exercises):
            advance(mark.student)
            rows.append(asdict(mark) | {"verdict": str(mark.verdict)})
    return rows


def _points(rows: list[dict[str, Any]], value: str = "points") -> pd.DataFrame:
    """A row for each student, a column for each exercise; empty where nothing was handed in; at the end the sum."""
    marks = pd.DataFrame(rows)
    cells = marks[value].astype(object).where(marks["handed_in"], "")
    grid = marks.assign(cells=cells).pivot(index="student", columns="exercise", values="cells")
    grid = grid[list(dict.fromkeys(marks["exercise"]))]
    return grid.assign(points=marks.groupby("student")["points"].sum())


def _print_marks(rows: list[dict[str, Any]]) -> None:
    """The grid, what each column is, then why something has not passed."""
    grid = _points(rows, "verdict").replace(SIGNS)
    given = [name for name in grid.columns[:-1] if grid[name].ne("").any()]
    numbers = {name: str(number) for number, name in enumerate(given, 1)}
    say(table_of(grid[[*given, "points"]].rename(columns=numbers).reset_index(), "", 1))
    console = Console(highlight=False)
    console.print("".join(f"\n{number}  {name}" for name, number in numbers.items()))
    _print_why(rows, console)


def _print_why(rows: list[dict[str, Any]], console: Console) -> None:
    """A line for each solution that has not passed, and how many have."""
    marks = pd.DataFrame(rows)
    # Files that cannot be read, once for all that is not handed in: the last part of its reason says that it is not.
    none = marks[~marks["handed_in"]].drop_duplicates("student")
    files = none.assign(exercise="-", reason=[reason.rpartition("; ")[0] for reason in none["reason"]])
    nothing = ~files["student"].isin(marks.loc[marks["handed_in"], "student"])
    files["reason"] = files["reason"].where(files["reason"].ne("") | ~nothing, "there is no function of an exercise")
    wrong = pd.concat([files[files["reason"] != ""], marks[marks["handed_in"] & (marks["verdict"] != "passed")]])
    if len(wrong):
        console.print()
        console.print(table_of(wrong.sort_values("student", kind="stable")[["student", "exercise", "reason"]], "", 1))
    passed, handed_in = int((marks["verdict"] == "passed").sum()), int(marks["handed_in"].sum())
    console.print(f"\n{passed} of {count(handed_in, 'solution')} passed.")
