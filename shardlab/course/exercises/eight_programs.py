"""Eight broken training programs: the reader finds the line, mends it, and ``same`` marks that on two ranks.

None of them raises an error, and the loss of each falls. They are stories of the matrix (``course.same_scripts``).
"""

import tempfile
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path

from shardlab.course.same_scripts import BROKEN, TEMPLATES
from shardlab.same.answer import Answer
from shardlab.same.process import Job
from shardlab.same.ranks import judged

PROGRAMS = (
    ("not divided by ranks", "by hand"), ("the module inside is called", "DDP"), ("a mean of means", "FSDP2"),
    ("cleared in each micro-batch", "DDP"), ("the norm of own pieces", "FSDP2"),
    ("a tied weight reduced twice", "by hand"), ("clipped before reduced", "by hand"),
    ("stepped weights are overwritten", "by hand"),
)  # fmt: skip
LIMIT_S = 60.0


def broken_program(number: int) -> str:
    """The text of one of the eight, 1 to 8.

    Raises:
        ValueError: there is none of that number.
    """
    story, kind = _found(number)
    return BROKEN[story].script(kind)


def numbered(number: int) -> str:
    """The same with the numbers of its lines."""
    lines = broken_program(number).splitlines()
    return "\n".join(f"{at:3}  {line}" for at, line in enumerate(lines, 1))


def is_at_fault(number: int, line: int) -> bool:
    """Whether the line, or one beside it, is what makes the program wrong."""
    right, broken = TEMPLATES[_found(number)[1]].splitlines(), broken_program(number).splitlines()
    changes = SequenceMatcher(None, right, broken, autojunk=False).get_opcodes()
    return any(tag != "equal" and first <= line <= last + 1 for tag, _, _, first, last in changes)


def mended(number: int, lines: Mapping[int, str]) -> Answer:
    """What ``same`` says on two ranks of the program with other lines.

    Args:
        number: of the program.
        lines: what stands in the place of a line, by its number, with its indentation; several lines, or none if empty.

    Raises:
        ValueError: there is no such program, or no such line.
    """
    text = dict(enumerate(broken_program(number).splitlines(), 1))
    if unknown := sorted(set(lines) - set(text)):
        raise ValueError(f"lines: {unknown[0]} is given; program {number} has lines 1 to {len(text)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text("\n".join((text | dict(lines)).values()) + "\n")
        return judged(Job(path), LIMIT_S)


def _found(number: int) -> tuple[str, str]:
    if not 1 <= number <= len(PROGRAMS):
        raise ValueError(f"number: {number} is given; there are programs 1 to {len(PROGRAMS)}")
    return PROGRAMS[number - 1]
