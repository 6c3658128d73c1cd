"""Every exercise: the starter fails, references pass, and each wrong solution fails for its own reason."""

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shardlab.course import LADDER, Exercise, Verdict
from shardlab.course.exercises.judge import LIMIT_S, examine
from shardlab.course.exercises.ladder import WHOLE, solution_of
from shardlab.course.exercises.mistakes import known, signature
from shardlab.launch import RankPool
from tests.course.exercises import wrong
from tests.course.exercises.reasons import WRONG
from tests.course.exercises.right import RIGHT

BY_NAME = pytest.mark.parametrize("exercise", LADDER, ids=lambda exercise: exercise.name)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two solutions hang, and the session's pools would wait for them for half a minute."""
    with RankPool(4, device="cpu", timeout_s=2.0, limit_s=LIMIT_S, notice_s=None) as pool:
        yield pool


@BY_NAME
def test_what_is_not_yet_a_solution_fails(ranks: RankPool, exercise: Exercise) -> None:
    exec(compile(exercise.starter, "starter", "exec"), namespace := {})
    for function in (namespace[exercise.function_name], lambda *_: None):
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


def printed(exercise: Exercise) -> Callable[..., object]:
    """The solution that teachers read."""
    source = solution_of(exercise).partition("```python\n")[2].removesuffix("```")
    exec(compile(source, "solution", "exec"), namespace := {})
    return namespace[exercise.function_name]


@BY_NAME
def test_references_pass_and_the_printed_one_with_numpys_numbers_too(ranks: RankPool, exercise: Exercise) -> None:
    solution = printed(exercise)
    numbers = solution if exercise in WHOLE else lambda *inputs: as_numpys(solution(*inputs))
    for function in (numbers, *RIGHT[exercise.name]):
        report = examine(exercise, function, ranks)
        assert (report.verdict, report.reason) == (Verdict.PASSED, "")


@BY_NAME
def test_wrong_solutions_fail_for_their_reason(ranks: RankPool, exercise: Exercise) -> None:
    sentences = [f"You get this when {sentence}" for _, sentence in known()[exercise.name].values()]
    for (function, reason), sentence in zip(WRONG[exercise.name].items(), sentences, strict=True):
        report = examine(exercise, function, ranks)
        assert report.verdict is Verdict.FAILED, function
        assert re.search(reason, report.reason, re.DOTALL), (function, report.reason)
        # The temporaries of another torch may have other bytes; and what is added to under way differs by run.
        if (exercise in WHOLE and "B at once" in report.reason) or function is wrong.sends_every_micro_batch:
            continue
        assert report.mistake == sentence, (function, signature(report.reason, report.case, report.done))


def test_the_numbers_of_solutions_are_those_held_here() -> None:
    for exercise in LADDER:
        wrong = WRONG[exercise.name]
        assert (exercise.num_references, exercise.num_wrong) == (len(RIGHT[exercise.name]), len(wrong))
        assert len(set(wrong.values())) == exercise.num_wrong >= 3, "each for its own reason"
        assert exercise.hints
