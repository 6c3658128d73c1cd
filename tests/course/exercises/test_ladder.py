"""Every exercise: the starter fails, references pass, and each wrong solution fails for its own reason."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from shardlab.course import LADDER, Exercise, Verdict
from shardlab.course.exercises.judge import LIMIT_S, examine
from shardlab.course.exercises.ladder import WHOLE
from shardlab.course.exercises.mistakes import known, signature
from shardlab.launch import RankPool
from tests.course.exercises import wrong
from tests.course.exercises.otherwise import COPIES, OTHERWISE, UNKNOWN, defined, named, printed
from tests.course.exercises.reasons import WRONG
from tests.course.exercises.right import RIGHT
from tests.course.exercises.whole import TOLD

BY_NAME = pytest.mark.parametrize("exercise", LADDER, ids=lambda exercise: exercise.name)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two solutions hang, and the session's pools would wait for them for half a minute."""
    with RankPool(4, device="cpu", timeout_s=2.0, limit_s=LIMIT_S, notice_s=None) as pool:
        yield pool


@BY_NAME
def test_what_is_not_yet_a_solution_fails(ranks: RankPool, exercise: Exercise) -> None:
    for function in (defined(exercise.starter, exercise.function_name), lambda *_: None):
        report = examine(exercise, function, ranks)
        assert report.verdict is Verdict.FAILED
        assert report.reason
        assert "Traceback" not in report.detail, "without frames of the package"


def as_numpys(value: object) -> object:
    """Each number as NumPy's, which a solution may well return."""
    if isinstance(value, dict):
        return {key: as_numpys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_numpys(item) for item in value]
    return np.array(value)[()] if isinstance(value, int | float) else value


@BY_NAME
def test_references_pass_and_the_printed_one_with_numpys_numbers_too(ranks: RankPool, exercise: Exercise) -> None:
    solution = printed(exercise)
    numbers = solution if exercise in WHOLE else lambda *inputs: as_numpys(solution(*inputs))
    for function in (numbers, *RIGHT[exercise.name]):
        report = examine(exercise, function, ranks)
        assert (report.verdict, report.reason, report.mistake) == (Verdict.PASSED, "", "")


@BY_NAME
def test_wrong_solutions_fail_for_their_reason(ranks: RankPool, exercise: Exercise) -> None:
    names = TOLD.get(exercise.name, list(known()[exercise.name]))
    for (function, reason), name in zip(WRONG[exercise.name].items(), names, strict=False):
        report = examine(exercise, function, ranks)
        assert report.verdict is Verdict.FAILED, function
        assert re.search(reason, report.reason, re.DOTALL), (function, report.reason)
        if function is not wrong.sends_every_micro_batch:  # what is added to under way differs by run
            found = signature(report.reason, report.case, report.done)
            assert report.mistake == sentence(exercise, name), (function, found)


def sentence(exercise: Exercise, name: str) -> str:
    """What is said of a mistake by its name."""
    return f"You get this when {({**known().get('whole', {}), **known()[exercise.name]})[name][1]}"


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_mistake_is_told_however_it_is_written(ranks: RankPool, name: str) -> None:
    exercise = named(name)
    for mistake, changes in OTHERWISE[name]:
        report = examine(exercise, printed(exercise, changes), ranks)
        assert report.mistake == sentence(exercise, mistake), (mistake, report.reason)
        if mistake == "not_freed":
            assert "raised RuntimeError: parameter '0.weight' is still gathered after forward; free" in report.reason
            assert not report.detail, "no frames of the package"


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_what_is_not_known_nothing_is_said(ranks: RankPool, name: str) -> None:
    exercise = named(name)
    report = examine(exercise, printed(exercise, UNKNOWN[name]), ranks)
    assert (report.verdict, report.mistake) == (Verdict.FAILED, ""), report.reason


def test_a_piece_that_is_a_copy_is_said_to_be_one(ranks: RankPool) -> None:
    for name, changes in COPIES.items():
        exercise = named(name)
        report = examine(exercise, printed(exercise, changes), ranks)
        assert "the piece of '0.weight' that the optimizer steps is no view of a parameter" in report.reason


def test_of_every_exercise_a_solution_is_held_here_and_three_wrong_ones() -> None:
    for exercise in LADDER:
        wrong = WRONG[exercise.name]
        assert RIGHT[exercise.name]
        assert len(set(wrong.values())) == len(wrong) >= 3, "each for its own reason"
        assert exercise.hints
