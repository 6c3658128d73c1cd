"""The eight broken programs: which lines are at fault, and that a mended one is called the same."""

import pytest

from shardlab.course import is_at_fault, mended, numbered
from shardlab.course.same_scripts import BROKEN, PROGRAMS, broken_program


def test_every_program_is_a_story_and_has_lines_at_fault_and_lines_that_are_not():
    assert len({text for number in range(1, 9) if (text := broken_program(number))}) == len(PROGRAMS) == 8
    for number, (story, *_) in enumerate(PROGRAMS, 1):
        count = len(numbered(number).splitlines())
        at_fault = [line for line in range(1, count + 1) if is_at_fault(number, line)]
        assert story in BROKEN
        assert len(at_fault) == 3, (number, at_fault)
    with pytest.raises(ValueError, match="programs 1 to 8"):
        numbered(9)


def test_a_mended_program_is_the_same_and_an_unknown_line_is_told():
    reduces = next(line for line, text in enumerate(broken_program(1).splitlines(), 1) if "all_reduce" in text)
    assert is_at_fault(1, reduces)
    assert mended(1, {reduces: "        dist.all_reduce(param.grad)\n        param.grad /= ranks"}).word == "SAME"
    with pytest.raises(ValueError, match="lines: 0 is given; program 1 has lines 1 to"):
        mended(1, {0: ""})
