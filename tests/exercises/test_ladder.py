"""Every exercise: the starter fails, references pass, and each wrong solution fails for its own reason."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from shardlab.exercises import LADDER, Exercise, Verdict, find
from shardlab.exercises.judge import LIMIT_S, TIMEOUT_S, examine
from shardlab.launch import RankPool
from tests.exercises.reasons import WRONG
from tests.exercises.right import RIGHT

BY_NAME = pytest.mark.parametrize("exercise", LADDER, ids=lambda exercise: exercise.name)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """As ``check`` has them: one solution hangs, and the session's pools would wait for it for half a minute."""
    with RankPool(4, device="cpu", timeout_s=TIMEOUT_S, limit_s=LIMIT_S, notice_s=None) as pool:
        yield pool


def solutions(of: dict) -> list:
    return [pytest.param(name, one, id=f"{name}-{one.__name__}") for name, all_of in of.items() for one in all_of]


@BY_NAME
def test_the_starter_is_a_function_that_fails(ranks: RankPool, exercise: Exercise) -> None:
    exec(compile(exercise.starter, "starter", "exec"), namespace := {})
    report = examine(exercise, namespace[exercise.function_name], ranks)
    assert report.verdict is Verdict.FAILED
    assert report.reason


@BY_NAME
def test_a_forgotten_return_is_told_without_frames_of_the_package(ranks: RankPool, exercise: Exercise) -> None:
    report = examine(exercise, lambda *_: None, ranks)
    assert report.verdict is Verdict.FAILED
    assert report.reason
    assert "Traceback" not in report.detail


@pytest.mark.parametrize(("name", "function"), solutions(RIGHT))
def test_references_pass(ranks: RankPool, name: str, function) -> None:
    report = examine(find(name), function, ranks)
    assert (report.verdict, report.reason) == (Verdict.PASSED, "")


def as_numpys(value: object) -> object:
    """Each number as NumPy's, which a solution may well return."""
    if isinstance(value, dict):
        return {key: as_numpys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_numpys(item) for item in value]
    return np.array(value)[()] if isinstance(value, int | float) else value


@BY_NAME
def test_references_pass_with_numpys_numbers(ranks: RankPool, exercise: Exercise) -> None:
    right = RIGHT[exercise.name][0]
    report = examine(exercise, lambda *inputs: as_numpys(right(*inputs)), ranks)
    assert (report.verdict, report.reason) == (Verdict.PASSED, "")


@pytest.mark.parametrize(("name", "function"), solutions(WRONG))
def test_wrong_solutions_fail_for_their_reason(ranks: RankPool, name: str, function) -> None:
    report = examine(find(name), function, ranks)
    assert report.verdict is Verdict.FAILED
    assert re.search(WRONG[name][function], report.reason, re.DOTALL), report.reason


@BY_NAME
def test_the_numbers_of_solutions_are_those_held_here(exercise: Exercise) -> None:
    assert (exercise.num_references, exercise.num_wrong) == (len(RIGHT[exercise.name]), len(WRONG[exercise.name]))
    assert exercise.num_wrong >= 3
    assert len(set(WRONG[exercise.name].values())) == exercise.num_wrong, "each for its own reason"
    assert exercise.hints
