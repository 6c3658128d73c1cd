"""What a learner calls in a cell: ``task``, ``hint``, ``check`` and ``predict``; and the file of the progress."""

import json
import os
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shardlab.course.exercises.exercise import Case, Exercise, Function
from shardlab.course.exercises.judge import LIMIT_S, TIMEOUT_S, Report, Verdict, examine, pool_for
from shardlab.course.exercises.ladder import LADDER
from shardlab.course.exercises.picture import differ, held, held_table, moved, moved_table
from shardlab.course.exercises.values import plain
from shardlab.launch.cell_bar import cell_bar
from shardlab.plots.show import is_in_a_cell, show

Named = str | Exercise
CLOSE = 0.1  # up to here a difference is said in percent, beyond it as a factor
MOST_OF_INPUTS = 300  # characters of a line
VARIABLE = "SHARDLAB_PROGRESS"
SCORE = ("messages", "bytes", "peak_bytes", "time_us")  # in the order in which a better one is looked for


def find(exercise: Named) -> Exercise:
    """The exercise of that name; one of your own is returned as it is.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(exercise, Exercise):
        return exercise
    known = {each.name: each for each in LADDER}
    if exercise not in known:
        raise ValueError(f"exercise: {exercise!r} is not known; there are {', '.join(known)}")
    return known[exercise]


def task(exercise: Named) -> None:
    """Print what is asked, and the source to begin with."""
    found = find(exercise)
    sys.stdout.write(f"{found.name}\n\n{found.task}\n\n{found.starter}\n")


def hint(exercise: Named, *, progress: Path | str | None = None) -> None:
    """Print the next hint; after the last one, the last one again."""
    found = find(exercise)
    if not found.hints:
        sys.stdout.write(f"{found.name} has no hints.\n")
        return
    number, last = Progress(progress).take_hint(found.name, len(found.hints)), len(found.hints) - 1
    again = ", which was the last" if number > last else ""
    number = min(number, last)
    sys.stdout.write(f"Hint {number + 1} of {len(found.hints)}{again}: {found.hints[number]}\n")


def check(
    exercise: Named, function: Function, *, progress: Path | str | None = None, timeout_s: float = TIMEOUT_S, limit_s:
    float = LIMIT_S,
) -> Report:  # fmt: skip
    """Run ``function`` on real ranks and say what differs: a sentence, a table, and the attempt beside what was wanted.

    Args:
        exercise: the name of one of ours, or an ``Exercise`` of your own.
        function: the learner's; it may come from a cell.
        progress: file that keeps the progress; None for ``$SHARDLAB_PROGRESS``, else one in the user's data directory.
        timeout_s: seconds that a rank may wait in one collective.
        limit_s: seconds for each case.

    Raises:
        ValueError: there is no such exercise, or the file holds no progress.
    """
    found, kept = find(exercise), Progress(progress)
    cases = found.cases()
    with cell_bar(found.name, len(cases)) as advance, pool_for(cases, timeout_s, limit_s) as pool:
        report = examine(found, function, pool, advance)
    _say(found, report)
    kept.add(report)
    return report


def table_of(report: Report) -> pd.DataFrame:
    """One row per rank of the case that failed: messages and bytes sent, beside what is enough."""
    rows = []
    for rank, done in enumerate(report.done):
        sent = [message for message in done.messages if message.is_sent]
        rows.append(
            {"rank": rank, "messages sent": len(sent), "bytes sent": round(sum(each.sent_bytes for each in sent))}
        )
    table = pd.DataFrame(rows)
    if report.case is not None and report.case.traffic is not None:
        table["messages needed"] = report.case.traffic.most_messages
        table["bytes needed"] = round(report.case.traffic.most_bytes)
    return table


def _say(exercise: Exercise, report: Report) -> None:
    if report.verdict is Verdict.PASSED:
        sys.stdout.write(f"{exercise.name}: passed. {report.score}".rstrip() + "\n")
        return
    sys.stdout.write(f"{exercise.name}: {report.verdict}. {report.reason}\n")
    if report.detail:
        sys.stdout.write(report.detail + "\n")
    if report.case is not None:
        sys.stdout.write(inputs_of(exercise, report.case))
    if not report.done:
        return
    counts = report.case is not None and report.case.traffic is not None
    if counts:
        _show_table(table_of(report))
    # A picture without a difference, beside a failure, would say that all is well.
    if (values := held_table(exercise, report))["differs"].any():
        show(held(values, f"Who held what: {exercise.name}", exercise.drawn_words))
    if counts and differ(messages := moved_table(report)):
        show(moved(messages, f"What moved: {exercise.name}"))


def inputs_of(exercise: Exercise, case: Case) -> str:
    """The inputs of a case, a line for each rank or one for all of them; empty where they are too long to read."""
    in_words = exercise.shown_inputs or (lambda *inputs: ", ".join(repr(plain(value)) for value in inputs))
    try:
        lines = [in_words(*inputs) for inputs in case.inputs]
    except TypeError:  # a module, for example
        return ""
    if max(map(len, lines)) > MOST_OF_INPUTS or not any(lines):
        return ""
    if len(set(lines)) == 1:
        return f"The inputs of this case: {lines[0]}\n"
    return "".join(f"The inputs of rank {rank} in this case: {line}\n" for rank, line in enumerate(lines))


def _show_table(table: pd.DataFrame) -> None:
    if not is_in_a_cell():
        sys.stdout.write(table.to_string(index=False) + "\n")
        return
    from IPython.display import display

    display(table)  # type: ignore[no-untyped-call]  # IPython leaves it untyped


def progress_path() -> Path:
    """``$SHARDLAB_PROGRESS``, else ``shardlab/exercises.json`` in the user's data directory."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "shardlab" / "exercises.json"


class Progress:
    """A learner's JSON file: attempts, hints taken and best score by exercise; a missing file is an empty one.

    Args:
        path: None for ``progress_path()``.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = progress_path() if path is None else Path(path)
        self._entries = self._read()

    def of(self, name: str) -> dict[str, Any]:
        """``attempts``, ``hints``, ``passed`` and the best score (``SCORE``) of one exercise."""
        return {"attempts": 0, "hints": 0, "passed": False, **self._entries.get(name, {})}

    def add(self, report: Report) -> None:
        """Count an attempt; a blocked one counts for nothing."""
        if report.verdict is Verdict.BLOCKED:
            return
        entry = self.of(report.exercise)
        entry["attempts"] += 1
        if report.verdict is Verdict.PASSED:
            score = report.score
            found = (score.messages, score.num_bytes, score.peak_bytes, score.time_us)
            best = min(found, tuple(entry.get(name, 0) for name in SCORE)) if entry["passed"] else found
            entry |= {"passed": True, **dict(zip(SCORE, best, strict=True))}
        self._write(report.exercise, entry)

    def take_hint(self, name: str, most: int) -> int:
        """Count a hint, up to ``most``, since the last one comes again; the number of those taken before."""
        entry = self.of(name)
        self._write(name, entry | {"hints": min(entry["hints"] + 1, most)})
        return int(entry["hints"])

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        try:
            entries = json.loads(self.path.read_text())
        except ValueError:
            entries = None
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ValueError(f"progress: {self.path} holds no progress; move it away, or name another file")
        return entries

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        # Read again: another notebook may have written since.
        self._entries = self._read() | {name: entry}
        # Written beside it and renamed: a kernel that dies meanwhile leaves the old file whole.
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self._entries, indent=2) + "\n")
            beside.replace(self.path)
        except OSError as error:  # the verdict stands all the same
            sys.stdout.write(f"Progress was not kept: {error}\n")


@dataclass(frozen=True)
class Prediction:
    """A number that somebody has written down before the run; ``value`` is None if nobody has."""

    what: str
    value: float | None
    unit: str

    def against(self, found: float) -> None:
        """Print what was found beside it, and how far off it was."""
        number = float(found)
        if self.value is None:
            sys.stdout.write(f"{self.what}: {self._said(number)} (you made no prediction)\n")
            return
        predicted = f"you predicted {self._said(self.value)}, {distance(self.value, number)}"
        sys.stdout.write(f"{self.what}: {self._said(number)}; {predicted}\n")

    def _said(self, number: float) -> str:
        text = f"{number:,.0f}" if number.is_integer() else f"{number:,.4g}"
        return f"{text} {self.unit}".rstrip()


def predict(what: str, value: float | None = None, unit: str = "") -> Prediction:
    """Keep the reader's prediction; compare it after the run with ``.against(found)``.

    Args:
        what: what the number is of.
        value: the reader's number; None asks for one.
        unit: of both numbers; empty for a count.

    Raises:
        ValueError: ``value`` is no finite number.
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if value is not None and not (is_number and isfinite(value)):
        raise ValueError(f"value: {value!r} was given; give a finite number{f' of {unit}' if unit else ''}, or None")
    prediction = Prediction(what, None if value is None else float(value), unit)
    if value is None:
        of_unit = f", in {unit}" if unit else ""
        sys.stdout.write(f"{what}{of_unit}? Put your number in the place of None before you run on.\n")
    return prediction


def distance(predicted: float, found: float) -> str:
    """How far a prediction is from what was found, in words."""
    if predicted == found:
        return "exactly"
    if found and (share := abs(predicted / found - 1)) <= CLOSE:
        percent = f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"  # never 0.0%, which would be exact
        return f"{percent} too {'high' if predicted > found else 'low'}"
    if found * predicted > 0:
        larger, smaller = sorted((abs(predicted), abs(found)), reverse=True)
        return f"too {'high' if predicted > found else 'low'} by a factor of {larger / smaller:.2g}"
    return f"too {'high' if predicted > found else 'low'} by {abs(predicted - found):.4g}"
