"""What a learner calls in a cell: ``task``, ``hint`` and ``check``."""

import sys
from typing import Any

import pandas as pd

from shardlab.course.exercises.exercise import Case, Done, Exercise, Function, code_in
from shardlab.course.exercises.judge import LIMIT_S, TIMEOUT_S, Report, Verdict, examine, pool_for, run_case
from shardlab.course.exercises.ladder import LADDER, solution_of
from shardlab.course.exercises.picture import differ, held, held_table, memory, moved, moved_table, schedule
from shardlab.course.exercises.values import plain
from shardlab.launch import RankPool
from shardlab.launch.cell_bar import cell_bar
from shardlab.plots.show import show

Named = str | Exercise
MOST_OF_INPUTS = 300  # characters of a line


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


def hint(exercise: Named, number: int = 1) -> None:
    """Print a hint: 1 is a first push, the last one nearly the solution.

    Raises:
        ValueError: there is no hint of that number.
    """
    found = find(exercise)
    if not 1 <= number <= len(found.hints):
        raise ValueError(f"number: {number} is given; {found.name} has {len(found.hints)} hints, from 1")
    then = f" (the next: hint({found.name!r}, {number + 1}))" if number < len(found.hints) else ""
    sys.stdout.write(f"Hint {number} of {len(found.hints)}{then}: {found.hints[number - 1]}\n")


def check(exercise: Named, function: Function, *, timeout_s: float = TIMEOUT_S, limit_s: float = LIMIT_S) -> Report:
    """Run ``function`` on real ranks and say what differs: a sentence, a table, and the attempt beside what was wanted.

    Args:
        exercise: the name of one of ours, or an ``Exercise`` of your own.
        function: the learner's; it may come from a cell.
        timeout_s: seconds that a rank may wait in one collective.
        limit_s: seconds for each case.

    Raises:
        ValueError: there is no such exercise.
    """
    found = find(exercise)
    cases = found.cases()
    with cell_bar(found.name, len(cases)) as advance, pool_for(cases, timeout_s, limit_s) as pool:
        report = examine(found, function, pool, advance)
        wanted = _done_right(found, report, pool)
    _say(found, report)
    if wanted:
        assert report.case is not None
        show(memory(report.done, wanted, report.case.most_peak_bytes, f"Memory over time: {found.name}"))
    return report


def _done_right(exercise: Exercise, report: Report, pool: RankPool) -> tuple[Done, ...]:
    """What a right answer comes to in the case that failed, where memory was wrong; empty if there is none."""
    case, source = report.case, code_in(solution_of(exercise))
    if case is None or report.verdict is not Verdict.FAILED or not source:
        return ()
    if not any(done.held and (done.fault or done.peak_bytes > case.most_peak_bytes) for done in report.done):
        return ()
    namespace: dict[str, Any] = {"__name__": "__main__"}  # as in a cell, or each function is looked for in all modules
    exec(compile(source, "solution", "exec"), namespace)
    return run_case(exercise, namespace[exercise.function_name], case, pool)[0]


def table_of(report: Report) -> pd.DataFrame:
    """One row per rank of the case that failed: messages and bytes sent, beside what is enough."""
    sent = [[message.sent_bytes for message in done.messages if message.is_sent] for done in report.done]
    columns = {"rank": range(len(sent)), "messages sent": map(len, sent), "bytes sent": map(round, map(sum, sent))}
    table = pd.DataFrame({name: list(values) for name, values in columns.items()})
    if report.case is not None and report.case.traffic is not None:
        table["messages allowed"] = report.case.traffic.most_messages
        table["bytes needed"] = round(report.case.traffic.most_bytes)
    return table


def _say(exercise: Exercise, report: Report) -> None:
    if report.verdict is Verdict.PASSED:
        sys.stdout.write(f"{exercise.name}: passed. {report.score}".rstrip() + "\n")
        _show_schedule(exercise, report)
        return
    said = [f"{exercise.name}: {report.verdict}. {report.reason}", report.mistake, report.detail]
    sys.stdout.write("".join(f"{line}\n" for line in said if line))
    if report.case is not None:
        sys.stdout.write(inputs_of(exercise, report.case))
    if not report.done:
        return
    counts = report.case is not None and report.case.traffic is not None
    if counts:
        show(table_of(report))
    # A picture without a difference, beside a failure, would say that all is well.
    if (values := held_table(exercise, report))["differs"].any():
        show(held(values, f"Who held what: {exercise.name}", exercise.drawn_words))
    _show_schedule(exercise, report)
    if counts and differ(messages := moved_table(report)):
        show(moved(messages, f"What moved: {exercise.name}"))


def _show_schedule(exercise: Exercise, report: Report) -> None:
    if report.case is not None and any(done.spans for done in report.done):
        show(schedule(report.done, report.case, f"Your schedule: {exercise.name}"))


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
